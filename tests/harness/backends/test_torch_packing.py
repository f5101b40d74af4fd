"""Products in float32 leave packed copies behind on Intel's processors, and nothing on others."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.backends import processor, torch_packing
from harness.backends.torch_packing import WARMED, Packing, packed
from harness.backends.torch_storage import LiveStorage

FIGURES = Path(__file__).parents[2] / "benchmarks" / "packing_figures.py"
MIB = 1 << 20


def kept(*shapes, vendor="GenuineIntel"):
    """Return what products of these rows, columns and depths leave behind beside the base, in bytes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
            patch.setattr(processor, "vendor", lambda: vendor)
            patch.setattr(torch.backends.mkl, "is_available", lambda: True)
            with LiveStorage() as live:
                for rows, columns, depth in shapes:
                    torch.mm(torch.empty(rows, depth), torch.empty(columns, depth).t())
            return live.live
    finally:
        torch.set_num_threads(threads)


LOGITS = 1024, 16384, 256


def test_the_weight_of_the_logits_stays_packed_and_its_buffer_is_used_again():
    smaller, larger = (1024, 14000, 256), (1024, 32000, 256)
    assert kept(LOGITS) == packed(*LOGITS, 2) == (16384 + 768) * 256 * 4
    assert kept(LOGITS, smaller, LOGITS) == kept(LOGITS)
    assert kept(LOGITS, larger) == kept(LOGITS) + kept(larger), "a larger one is taken beside it"
    assert kept(larger) == (20_000 + 768) * 256 * 4


def test_a_deep_product_has_buffers_of_its_own_and_a_narrow_one_a_result_for_each_thread():
    deep, narrow = (512, 512, 8 * 512), (1024, 256, 8 * 256)
    assert kept(deep) == 3 * MIB and kept(narrow) == 3 * MIB + 1024 * 256 * 4
    assert kept((512, 512, 8 * 512 - 1)) == 0, "the buffers that every worker has are larger"
    assert kept((512, 16, 512)) == 0, "those of adapters are too small"
    assert kept(LOGITS, deep, deep) == kept(LOGITS) + kept(deep)


@pytest.mark.parametrize(("depth", "block"), [(320, 320), (384, 384), (385, 193), (576, 288), (768, 384), (769, 384)])
def test_a_depth_of_up_to_two_blocks_is_halved(depth, block):
    assert packed(512, 16384, depth, 2) == (16384 + 512) * block * 4


def test_what_every_worker_has_packed_before_counts_no_more():
    assert kept((1024, 8192, 256)) == kept(WARMED) == 0


def test_few_rows_and_other_processors_leave_nothing():
    assert kept((64, 16384, 256)) == kept(LOGITS, vendor="AuthenticAMD") == 0


def test_only_products_in_float32_are_packed():
    packing = Packing()
    packing.active = True
    wide, narrow = (torch.empty(16384, 2048, dtype=dtype, device="meta") for dtype in (torch.float32, torch.bfloat16))
    assert packing.added(torch.ops.aten.mm.default, (narrow, narrow.t())) == 0
    assert packing.added(torch.ops.aten.add.Tensor, (wide, wide)) == 0
    assert packing.added(torch.ops.aten.addmm.default, (wide[0], wide, wide.t())) > 0


@pytest.mark.skipif(not torch_packing.packs(), reason="the library packs on Intel's processors alone")
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("shape", [(1024, 16384, 256), (256, 16384, 1024), (1024, 4096, 1024), (128, 16384, 256)])
def test_what_stays_of_a_product_is_what_is_predicted(shape, threads):
    command = [sys.executable, str(FIGURES), str(threads), *map(str, shape)]
    measured = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert measured == pytest.approx(packed(*shape, threads), abs=1.3 * MIB)
