"""The systems with computing that is done, not waited for: by a CUDA device, or by its kernels on a
processor, which shows everything except the copies and what goes on beside them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from test_systems import KNOBS, TINY, assert_stored

from experiments import ablation, ttft
from experiments.common import Unable
from experiments.harness import Disk, Options
from experiments.systems.catalogue import System, systems
from experiments.systems.cell import Bench, Load, order_of
from experiments.systems.cuda import Cuda
from experiments.systems.data import Data
from experiments.systems.device import Rows
from experiments.systems.generate import N_NEW, Prefix
from experiments.systems.planned import choose
from experiments.systems.quantised import quantised_rows
from experiments.systems.shapes import Shape
from experiments.systems.sizes import n_prefixes
from tiers.hbm import why_not

GATED = Shape("gated", 2, 8, 2, 32, 96, gated=True, dtype="bfloat16")
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Data]:
    made = Data.of(TINY, 2, 2, tmp_path / "data", KNOBS, 1, tokens=(256, 384))
    yield made
    made.remove()


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("system", systems(), ids=lambda s: s.name)
def test_every_system_brings_rows_that_were_stored(system: System, on: str, data: Data) -> None:
    load = Load(n_measured=3, n_warm=1, most_windows=1)
    with Bench([system], data, load, dilation=1.0, on=on) as bench:
        (server,) = bench.servers
        server.choose_modes(data.prefixes[0].n_tokens)
        for prefix, request in order_of(load, 2)[:3]:
            seen = []
            server.watch = lambda layer, *rows, seen=seen: seen.append(
                (layer, *(tensor.cpu().clone() for tensor in rows))
            )
            served = server.serve(bench.asking(prefix, request))
            assert served.ttft_s >= served.io_s >= 0 <= served.compute_s
            assert len(seen) == (0 if served.mode == "recompute" else data.n_layers)
            for layer, k, v, positions in seen:
                assert_stored(system, data, prefix, layer, k, v, positions)
                if on == "cpu" and served.mode == "sparse":
                    wanted = _chosen(data, system, prefix, request, layer)
                    assert np.array_equal(np.sort(positions), wanted)  # all rows: in any order


def _chosen(data: Data, system: System, prefix: int, request: int, layer: int) -> np.ndarray:
    source = data.prefixes[prefix]
    made = choose(prefix, source, [system.policy], [request], data.geometry, KNOBS)
    positions = made[system.policy, prefix, request][layer].positions
    return np.arange(source.n_tokens) if positions is None else positions


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("shape", [TINY, GATED], ids=lambda shape: shape.name)
def test_new_tokens_on_rows_come_to_what_the_whole_prompt_comes_to(shape: Shape, on: str) -> None:
    n = 64
    device = Cuda(shape, 2, [Prefix(shape, n, 7, 8)], KNOBS, on)
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    project = device._projected

    def keeping(layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = project(layer)
        kept[layer] = k[:n].transpose(0, 1), v[:n].transpose(0, 1)
        return q, k, v

    device._projected = keeping  # type: ignore[method-assign]
    device.start()
    for layer in range(2):
        device.forward(layer, n + N_NEW)
    whole = device._h[-N_NEW:].float()
    device._projected = project  # type: ignore[method-assign]
    device.start()
    shuffled = torch.randperm(n)
    for layer in range(2):
        k, v = (rows[:, shuffled.to(rows.device)].cpu() for rows in kept[layer])
        device.project(layer)
        device.attend(layer, Rows(k, v, shuffled))
    device.finish()
    assert torch.allclose(device._h.float(), whole, atol=0.05 * float(whole.abs().max()))
    assert device.spent_s > 0


@pytest.mark.parametrize("on", ON)
def test_keys_that_were_looked_at_are_taken_on_the_device(on: str) -> None:
    """Keys of the layer before are not taken for them."""
    n = 64
    prefix = Prefix(GATED, n, 7, 8)
    device = Cuda(GATED, 2, [prefix], KNOBS, on)
    at = torch.arange(1, n, 4)
    came = []
    for scored in ((), (0,), (0, 1)):  # layers whose keys all went up
        device.start()
        for layer in range(2):
            k, v = prefix.keys(layer), prefix.values(layer)[:, at]
            device.project(layer)
            if layer in scored:
                device._to_score(k)
                device.attend(layer, Rows(torch.zeros_like(k), v, chosen=at))
            else:
                device.attend(layer, Rows(k[:, at], v))
        device.finish()
        came.append(device._h.float())
    near = 0.01 * float(came[0].abs().max())
    assert all(torch.allclose(came[0], other, atol=near) for other in came[1:])


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_few_bits_are_what_they_were_nearly(bits: int, on: str) -> None:
    prefix = Prefix(TINY, 64, 1, 8)
    device = Cuda(TINY, 1, [prefix], KNOBS, on)
    keys = prefix.keys(0)
    words = torch.from_numpy(quantised_rows(keys, TINY.geometry(1), bits).view(np.int16))
    got = device._dequantised(words[0].to(on).view(torch.float16), bits).cpu().float()
    step = keys.float().abs().amax() * 2 / (1 << bits)
    assert (got - keys.float()).abs().max() <= step


def _options(tmp_path: Path, **more: object) -> Options:
    asked = {"unchecked": True, "compute": "emulated", "systems": None, "requests": None, **more}
    disk = Disk(3.0, "given")
    return Options(
        False, None, None, False, tmp_path, 1, disk, argparse.Namespace(**asked), ExitStack()
    )


def test_fewer_requests_of_fewer_systems_can_be_asked_for(tmp_path: Path) -> None:
    """A machine with a GPU may be had for ten minutes."""
    found = ttft.cells(_options(tmp_path, requests=60, systems="as, impress"))
    sizes = {cell.params["cell"]: cell.params["n"] for cell in found[1:]}
    assert sizes["base"] == sizes["ratio 65"] == 60
    assert sizes["in_a_row 8"] == 64  # else its rows were not whole, found only at the end
    assert {cell.params["systems"] for cell in found[1:]} == {"as,impress"}
    few = ttft.cells(_options(tmp_path, requests=60, systems="as, impress", prefixes=4))[1]
    assert few.params["asked_prefixes"] == 4 and few.seconds < found[1].seconds
    more = ttft.cells(_options(tmp_path, systems="as, impress", prefixes=6))
    fit = {cell.params.get("cell") for cell in more}
    assert {"base", "ratio 65"} <= fit and "shape opt-30b" not in fit
    assert "systems" not in ttft.cells(_options(tmp_path))[1].params


def test_a_deeper_slice_can_be_asked_for_and_is_another_cell(tmp_path: Path) -> None:
    """Four layers of a model whose rows are small take less than the least gain for which the mode
    is left that the policy names."""
    usual, deep = (ttft.cells(_options(tmp_path, systems="as, impress", layers=layers))
                   for layers in (None, 8))  # fmt: skip
    assert deep[1].params == {**usual[1].params, "asked_layers": 8}
    assert deep[1].seconds > 1.5 * usual[1].seconds
    with pytest.raises(Unable, match="--layers: at least 1, got 0"):
        ttft.cells(_options(tmp_path, layers=0))


def test_a_deeper_slice_stays_within_the_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--layers 32` gave every cell four prefixes whatever was left for caches: those of all
    systems took several times the 10 GiB that they have together. And 40 layers of a model that
    has 32 were measured."""

    def n(shape: str, n_systems: int, layers: int | None) -> int:
        return n_prefixes(shape, 130, n_systems, quick=False, layers=layers)

    assert [n("opt-6.7b", of, 32) for of in (2, 4)] == [6, 3]
    with pytest.raises(Unable, match=r"12 systems have no room .* of opt-30b: name fewer --sys"):
        n("opt-30b", 12, 32)
    assert n("opt-30b", 16, None) == 4  # as published cells were
    with pytest.raises(Unable, match="--layers 33: llama-3-8b has 32"):
        n("llama-3-8b", 2, 33)
    capsys.readouterr()
    found = ttft.cells(_options(tmp_path, systems="as, impress", layers=40))
    assert {cell.params.get("cell") for cell in found[1:]} == {"shape opt-13b", "shape opt-30b"}
    assert "base is left out: --layers 40: opt-6.7b has 32" in capsys.readouterr().out


def test_cells_of_another_clock_or_of_other_systems_are_not_taken_for_these(tmp_path: Path) -> None:
    """`--resume` kept requests in a row that were timed by an older clock, and an ablation that
    lacked a system: the paper's shares were then missing, without a word."""
    (in_a_row,) = [c for c in ttft.cells(_options(tmp_path)) if c.params.get("in_a_row") == 8]
    assert in_a_row.params["clock"] == "from the first token before"
    for cell in ablation.cells(_options(tmp_path))[1:]:
        assert cell.params["systems"] == ",".join(ablation.NAMES)


def test_cells_of_two_cards_are_two_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--resume` on a machine that differed only in its card had both in one report."""
    found = []
    for card in ("NVIDIA H100", "NVIDIA H200"):
        monkeypatch.setattr("experiments.systems.sizes.why_not", lambda: "")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=card: name)
        found.append(ttft.cells(_options(tmp_path, compute="real"))[-1].params)
    assert found[0] | {"device": "NVIDIA H200"} == found[1] != found[0]


def test_a_cell_that_does_not_fit_does_not_keep_others_from_being_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 prefixes of Llama-3-8B fit, and were refused because so many of the base cell's do not."""
    found = [cell.params.get("cell") for cell in ttft.cells(_options(tmp_path, prefixes=20))]
    assert found == [None, "shape llama-3-8b"]
    assert "base is left out: --prefixes 20: 5 fit" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("more", "said"),
    [({"requests": 39}, "--requests: at least 40"), ({"systems": "as,foo"}, "'foo' is none of rec"),
     ({"systems": "as,impress,as"}, "--systems: as more than once"),
     ({"systems": ","}, "--systems: a name is empty"),
     ({"systems": ""}, "--systems: a name is empty"),
     ({"prefixes": 1}, "--prefixes: at least 2"), ({"prefixes": 99}, "--prefixes 99: 5 fit, of op"),
     pytest.param({"compute": "real"}, "--compute real: ", marks=pytest.mark.skipif(
         not why_not(), reason="a device is there"))],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(
    more: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(Unable, match=said):
        ttft.cells(_options(tmp_path, **more))
