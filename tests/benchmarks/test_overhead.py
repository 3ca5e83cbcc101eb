import overhead


def test_ratios_are_paired():
    """A machine that is twice as slow in one round leaves the ratio as it is."""
    times = {"npu-fusion": [1.0, 2.0, 1.0], "verl": [2.0, 4.0, 2.0]}
    found = overhead.summary(times, "npu-fusion")
    assert found["verl"] == {"us": 2e6, "ratio": 0.5}
    assert found["npu-fusion"]["ratio"] == 1


def test_every_call_is_measured_in_every_round():
    calls = {"a": 0, "b": 0}

    def count(name):
        calls[name] += 1

    times = overhead.paired({name: lambda name=name: count(name) for name in calls}, rounds=3, repeats=2)
    assert calls == {"a": 8, "b": 8}  # a round to warm up
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
