"""A small character GPT: which character comes next?"""
