"""The ways in: the `LLM` class, the command line (`cli`) and the HTTP server (`openai`)."""
