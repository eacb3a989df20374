"""How is a training script supervised that knows nothing of Twinhull?"""
