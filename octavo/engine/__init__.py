"""The engine: text in, steps, text out. `core` runs the steps, in a process of its own behind `wire` for servers
(`async_engine`) or in the caller's (`LLM`); `input_processor` and `output_processor` turn text to tokens and back.
"""
