"""An engine within an asyncio program: two requests at once, one of which is given up half way."""

import asyncio

from octavo import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def main() -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(max_model_len=1024))

    async def answer(prompt: str) -> str:
        text = ""
        async for output in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=16), request_id=prompt):
            text = output.outputs[0].text  # all there is of it so far
        return text

    async def begin(prompt: str) -> str:
        text = ""
        endless = SamplingParams(seed=3, max_tokens=500, ignore_eos=True)
        async for output in engine.generate(prompt, endless, request_id=prompt):
            text = output.outputs[0].text
            if len(output.outputs[0].token_ids) >= 8:
                await engine.abort(prompt)
                break
        return text

    whole, part = await asyncio.gather(answer("The capital of France is"), begin("Once upon a time"))
    print(f"whole: {whole!r}\ngiven up: {part!r}")
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
