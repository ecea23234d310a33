"""From the name of a model to named tensors: hub ids, folders, GGUF files, random weights, and tokenizers.

Two halves. `checkpoint.resolve` finds the files and reads the configuration; it never imports torch, so that the server
process stays light. `weights.open_weights` yields tensors and runs where the model runs.
"""
