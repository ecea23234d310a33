"""Answers to a list of prompts, without a server."""

from octavo import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(max_model_len=1024)  # model="Qwen/Qwen3-0.6B", a folder or a GGUF file; without one the default model
    prompts = ["The capital of France is", "1, 1, 2, 3, 5,", "Water boils at"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
