"""How is the state of a run kept, so that it can be trusted?"""
