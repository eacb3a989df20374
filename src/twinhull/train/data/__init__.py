"""Where do batches come from, and where in them does a run stand?"""
