"""A shop that learns overnight and answers all day: a two-tower recommender on the sales of a real web shop."""
