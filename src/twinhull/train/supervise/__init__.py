"""Who starts the ranks, watches them and starts them again, on one machine or several?"""
