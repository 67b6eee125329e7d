"""Train a DFlash drafter, measure its acceptance length, export it for serving. Nothing here imports vLLM.

data, loops, overlap, prepare, regenerate    rows of text -> token ids with a loss mask, written by the target
features, feature_cache, vocabulary          the frozen target's hidden states and most probable tokens
anchors, attention, model, loss              one training step
settings, optimizer, trainer, checkpoint     the loop around it
evaluate, export, model_card                 acceptance length; folders that vLLM serves
"""
