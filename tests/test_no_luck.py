"""No test depends on luck: what makes one do so is refused, with what to do instead."""

from pathlib import Path

import pytest

from tests.luck import FILES, INDEX, MEMORY, PATIENCE, PAUSE, PORT, SEED, SLEEP, SPEED, find_luck

TESTS = Path(__file__).parent
# (file, what it does): why it may.
ALLOWED = {
    ("waiting.py", SLEEP): "it is where tests wait",
    ("ports.py", PORT): "it holds the port",
    ("deploy/stub_server.py", SLEEP): "a server that dies slowly, for which nobody waits",
    ("ops/test_runtime.py", PAUSE): "threads fall asleep when they have spun for a while, and tell nobody",
}


def test_no_test_depends_on_luck() -> None:
    found = set()
    for path in sorted(TESTS.rglob("*.py")):
        name = str(path.relative_to(TESTS))
        for line, why in find_luck(path.read_text()):
            if (name, why) in ALLOWED:
                found.add((name, why))
            else:
                raise AssertionError(f"tests/{name}:{line}: {why}")
    assert found == ALLOWED.keys(), "who is allowed does it"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("time.sleep(0.1)", SLEEP),
        ("await asyncio.sleep(delay)", SLEEP),
        ("await asyncio.sleep(0)", None),
        ("threading.Event().wait(0.05)", PAUSE),
        ("process.wait(within(60))", None),
        ("client.get(url, timeout=0.2)", PAUSE),
        ("client.get(url, timeout=within(60))", None),
        ("with pytest.raises(httpx.ReadTimeout): pass", PATIENCE),
        ("begin = time.monotonic()\n    assert time.monotonic() - begin < 2", SPEED),
        ("begin = perf_counter()\n    took = perf_counter() - begin\n    assert 5 >= took", SPEED),
        ("deadline = time.time() + 5\n    while x:\n        assert time.time() < deadline", SPEED),
        ("begin = time.monotonic()\n    assert time.monotonic() - begin >= 2", None),
        ("sock.bind(('127.0.0.1', 0))", PORT),
        ("sock.bind(('127.0.0.1', port))", None),
        ("np.random.default_rng()", SEED),
        ("np.random.default_rng(3)", None),
        ("random.Random()", SEED),
        ("torch.Generator()", SEED),
        ("torch.Generator().manual_seed(0)", None),
        ("random.seed()", SEED),
        ("torch.randn(3)", None),
        ("psutil.Process().memory_info()", MEMORY),
        ("psutil.Process(pid).memory_info()", None),
        ("resource.getrusage(resource.RUSAGE_SELF)", MEMORY),
        ("len(os.listdir('/proc/self/fd'))", FILES),
        ("try: pass\n    except (OSError, subprocess.TimeoutExpired) as e: pass", INDEX),
    ],
)
def test_each_kind_is_seen(source: str, why: str | None) -> None:
    found = [said for _, said in find_luck(f"async def test_it():\n    {source}\n")]
    assert set(found) == ({why} if why else set())


@pytest.mark.parametrize("drawn", ["torch.randn(3)", "random.random()", "[np.random.choice(x) for x in y]"])
def test_what_is_drawn_at_import_has_a_seed(drawn: str) -> None:
    """Tests and fixtures have theirs from their names; modules have none."""
    assert find_luck(f"VALUES = {drawn}") == [(1, SEED)]
    assert find_luck(f"def draw():\n    return {drawn}") == []
    assert find_luck("ROWS = torch.randn(3, generator=torch.Generator().manual_seed(0))") == []
