"""A request with pictures goes on with another core after the death of its own."""

from __future__ import annotations

from pathlib import Path

from octavo import SamplingParams
from tests.engine.test_resubmission import answer, told
from tests.multimodal.conftest import picture
from tests.multimodal.test_llava import engine
from tests.untimed import without_time


def test_pictures_go_with_their_request(llava: Path) -> None:
    llm = engine(llava)
    without_time(llm.core)
    pictures = [picture(0), picture(1, 90, 33)]
    params = SamplingParams(max_tokens=12, temperature=1.0, logprobs=2, ignore_eos=True)
    prompt = {"prompt": "<image> is not <image>, as", "multi_modal_data": {"image": pictures}}
    request = llm.inputs.process(prompt, params)
    expected = told(answer(llm, request, ()))
    for deaths in ([1], [2], [4], [3, 6, 9]):
        assert told(answer(llm, request, deaths)) == expected
    other = llm.inputs.process(prompt | {"multi_modal_data": {"image": pictures[::-1]}}, request.params)
    assert told(answer(llm, other, [4]))[0] != expected[0], "pictures matter"
    llm.close()
