"""The networks. `registry` maps an architecture's name to a configuration reader and a model builder; `description` is
what readers return; `families` is the table of architectures, `readers` what reads config.json by it, and `decoder`
builds what descriptions say.
"""
