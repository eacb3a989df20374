"""A shop that learns overnight and answers all day: a two-tower model of a real shop's sales."""
