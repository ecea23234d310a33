"""From the name of a model to named tensors: hub ids, folders, GGUF files, random weights, and tokenizers.

Two halves. `checkpoint.resolve` finds the files and reads the configuration, in the server process too.
`file_weights.open_weights` yields tensors as numpy arrays and runs where the model runs. `recording` finds out which
tensors a model takes.
"""
