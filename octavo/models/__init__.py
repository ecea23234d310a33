"""The networks. `registry` maps an architecture's name to a configuration reader and a model builder; `description` is
what readers return; `readers` holds the table of the Llama family and `decoder` builds what descriptions say.
"""
