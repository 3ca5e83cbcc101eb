"""The published experiment runs on any device: every variant trains alike, and counts fall as layers are swapped."""

import argparse

import npu_emulator
import pytest
import train_step


@pytest.mark.skipif(not npu_emulator.is_emulated(), reason="times, which hardware gives, are compared with nothing")
def test_variants_train_alike():
    options = argparse.Namespace(model="tiny", layers=1, batch=1, length=8, accumulate=2, warmup=1, steps=1)
    rows = {row["variant"]: row for row in train_step.run(options, emulated=True)}
    assert list(rows) == list(train_step.VARIANTS)
    launches = {variant: row["launches"] for variant, row in rows.items()}
    assert launches["rms_norm"] < launches["original"]
    assert launches["all of npu-fusion"] < launches["rms_norm + swiglu"]
    # bfloat16 has 8 bits: a loss near log(256) = 5.5 is known to 0.03
    assert all(abs(row["loss"] - rows["original"]["loss"]) < 0.03 for row in rows.values())
    assert rows["rms_norm"]["published_percent"] == 5.49
