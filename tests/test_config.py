"""Numbers that do not fit together are refused before anything is built, with the numbers and the options."""

from __future__ import annotations

import pytest
import tiny

from jax5d.config import ConfigError, MeshConfig, ParallelConfig, RunConfig, TrainConfig, check, check_devices

REFUSED = {
    "B15 heads over tp": ({"tp": 4}, {"heads": 6, "d_model": 48}, r"model\.heads=6.*mesh\.tp=4"),
    "B15 more tp than heads": ({"tp": 8}, {}, r"model\.heads=4.*mesh\.tp=8"),
    "B15 width over heads": ({}, {"d_model": 30}, r"model\.d_model=30.*model\.heads=4"),
    "B09 three kv heads": ({"tp": 2}, {"heads": 6, "d_model": 48, "kv_heads": 3}, r"model\.kv_heads=3.*mesh\.tp=2"),
    "B09 kv heads over heads": ({}, {"kv_heads": 3}, r"model\.heads=4.*model\.kv_heads=3"),
    "kv heads below 0": ({}, {"kv_heads": -1}, r"model\.kv_heads=-1"),
    "overlap of what is not split": ({"tp": 2}, {"overlap": True}, r"parallel\.overlap.*parallel\.sequence"),
    "B09 six heads": ({"tp": 4}, {"heads": 6, "d_model": 36}, r"heads=6.*tp=4"),
    "B13 layers over pp": ({"pp": 4}, {"layers": 6}, r"model\.layers=6.*mesh\.pp=4"),
    "B70 batch": ({"dp": 2, "tp": 2, "pp": 2}, {"microbatches": 3}, r"global_batch=8 .* 2 x 1 x 3 = 6"),
    "B70 experts": ({"ep": 3}, {"moe": True, "global_batch": 9}, r"model\.experts=4.*mesh\.ep=3"),
    "B70 sequence": ({"cp": 3}, {}, r"train\.seq_len=32.*mesh\.cp=3"),
    "width over tp": ({"tp": 4}, {"d_ff": 130}, r"d_ff=130.*tp=4"),
    "sequence parallelism": ({"tp": 4, "cp": 4}, {"sequence": True, "seq_len": 24}, r"24/4 = 6 .*mesh\.tp=4"),
    "longer than the context": ({}, {"seq_len": 64}, r"seq_len=64.*context=32"),
    "group": ({}, {"moe": True, "group": 5}, r"model\.group=5.* 32 "),
    "top_k": ({}, {"moe": True, "top_k": 5}, r"top_k=5.*1\.\.4"),
    "dropout": ({}, {"dropout": 1.0}, r"dropout=1\.0"),
    "learning rate": ({}, {"learning_rate": 0.0}, r"learning_rate=0\.0"),
    "not a number": ({}, {"learning_rate": float("nan")}, r"learning_rate=nan"),
    "plain attention": ({"cp": 2}, {"attention": "plain"}, r"attention='plain'.*mesh\.cp=2.*seq_len=32 .*of 16;"),
    "parameters": ({}, {"param_dtype": "bfloat16"}, r"param_dtype=bfloat16.*dtype=float32 "),
    "llama's experts": ({}, {"moe": True, "architecture": "llama"}, r"experts=4.*architecture=llama"),
    "odd heads": ({}, {"architecture": "llama", "d_model": 36}, r"36/4 = 9 dims"),
    "axis": ({"dp": -1}, {}, r"mesh\.dp=-1"),
}


@pytest.mark.parametrize(("mesh", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(mesh, options, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        tiny.config(mesh, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("sizes", "product"), [((3, 2, 1, 1, 2), "3*2*1*1*2=12"), ((1, 2, 1, 1, 2), "1*2*1*1*2=4")])
def test_devices(sizes, product):
    """B70: 2*2*3 = 12 on 8 devices; a product of 4 uses 4 of 8 only where that is asked for."""
    mesh = MeshConfig(*sizes)
    with pytest.raises(ConfigError) as refusal:
        check_devices(mesh, 8)
    assert f"{product} but 8 devices" in str(refusal.value)
    check_devices(mesh, mesh.size)


def test_the_batch_stays_when_the_mesh_changes():
    """B70: data shards take rows from the global batch; none are added."""
    for dp in (1, 2, 4, 8):
        check(RunConfig(MeshConfig(dp=dp), train=TrainConfig(global_batch=8), parallel=ParallelConfig()))
