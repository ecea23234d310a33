"""The networks. `registry` maps an architecture's name to a configuration reader and a model builder. Readers return a
description (`description`). `families` is the table of architectures; `config_reader` reads config.json by this table;
`decoder` builds the network of a description.
"""
