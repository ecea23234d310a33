"""Speech to text: `transcription_routes` has OpenAI's routes, `transcriber` runs the model window by window."""
