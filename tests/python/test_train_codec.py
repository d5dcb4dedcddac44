"""The compiled codec and outer step against references in NumPy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import reference_codec as reference
import torch

from torch_geomesh import backend


def compiled() -> object:
    return backend.extension()


def make_vector(sizes: list[tuple[int, int]], seed: int, dead: float = 0.0) -> reference.Vector:
    rng = np.random.default_rng(seed)
    pieces = []
    for size, row in sizes:
        piece = (rng.standard_normal(size) * 10.0 ** rng.uniform(-6, 2)).astype(np.float32)
        if row:
            for begin in range(0, size, row):
                if rng.random() < dead:
                    piece[begin : begin + row] = 0
        pieces.append(piece)
    return reference.Vector(pieces, [row for _, row in sizes])


SIZES = [[(n, 0)] for n in (1, 7, 63, 64, 65, 300, 2305, 4096, 4097, 9000)] + [
    [(640, 32), (100, 0), (5000, 50)],
    [(12_288, 128), (3, 0), (4096, 64), (1, 0)],
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("dead", [0.0, 0.5, 0.97])
def test_bytes_are_those_of_the_reference(
    sizes: list[tuple[int, int]], rotate: bool, dead: float
) -> None:
    vector = make_vector(sizes, seed=len(sizes) + sizes[0][0], dead=dead)
    arguments = {"rotation_seed": 2**63 + 5, "dither_seed": 77, "weight": 12_345}
    ours = reference.encode(vector, rotate=rotate, **arguments)
    theirs = compiled().sign_encode(
        [torch.from_numpy(p) for p in vector.pieces],
        row_elements=list(vector.row_elements),
        rotate=rotate,
        **arguments,
    )
    assert theirs == ours


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weighted_means_are_those_of_the_reference(sizes: list[tuple[int, int]]) -> None:
    vectors = [make_vector(sizes, seed=10 + rank, dead=0.4) for rank in range(3)]
    weights = [300, 0, 7]
    codes = [
        reference.encode(v, rotation_seed=9, dither_seed=rank, weight=weights[rank])
        for rank, v in enumerate(vectors)
    ]
    mean = compiled().sign_decode_mean(
        codes,
        [torch.from_numpy(p) for p in vectors[0].pieces],
        rotation_seed=9,
        row_elements=list(vectors[0].row_elements),
    )
    expected = reference.decode_mean(codes, vectors[0], rotation_seed=9)
    assert mean.numpy().tobytes() == expected.tobytes()


def test_the_estimate_is_unbiased() -> None:
    # In the reference, so also in what equals it: the mean over seeds approaches the vector.
    vector = make_vector([(256, 0)], seed=1)
    vector.pieces[0][:] = np.linspace(-1, 3, 256) ** 3
    means = []
    for seed in range(300):
        code = reference.encode(vector, rotation_seed=seed, dither_seed=seed)
        means.append(reference.decode_mean([code], vector, rotation_seed=seed))
    error = np.mean(means, axis=0) - vector.values
    one_error = means[0] - vector.values
    # The error of a mean of 300 is sqrt(300) times smaller; allow 1.5 times that.
    assert np.linalg.norm(error) < 1.5 * np.linalg.norm(one_error) / np.sqrt(300)


def test_reference_has_no_code_for_nan() -> None:
    with pytest.raises(ValueError, match="NaN"):
        reference.encode(
            reference.Vector([np.array([np.nan], np.float32)], [0]), rotation_seed=0, dither_seed=0
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_step_is_plain_fp32_arithmetic(dtype: torch.dtype, nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(37,), (5, 11), (), (0, 3), (4, 3, 2)]
    anchor = [torch.randn(shape, generator=generator) for shape in shapes]
    current = [torch.full(shape, 9.0, dtype=dtype) for shape in shapes]
    elements = sum(a.numel() for a in anchor)
    momentum = torch.randn(elements, generator=generator)
    mean = torch.randn(elements, generator=generator)
    lr, mu = np.float32(0.7), np.float32(0.9)
    g = mean.numpy().copy()
    m = mu * momentum.numpy() + g
    step = g + mu * m if nesterov else m
    before = np.concatenate([a.numpy().reshape(-1) for a in anchor])
    after = before - lr * step

    compiled().outer_step_(anchor, current, momentum, mean, 0.7, 0.9, nesterov)

    assert momentum.numpy().tobytes() == m.tobytes()
    flat = torch.cat([a.reshape(-1) for a in anchor])
    assert flat.numpy().tobytes() == after.tobytes()
    assert torch.equal(torch.cat([c.reshape(-1) for c in current]), flat.to(dtype))


def test_outer_step_is_torchs_nesterov() -> None:
    parameter = torch.nn.Parameter(torch.randn(50))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    anchor, current = [parameter.detach().clone()], [torch.zeros(50)]
    momentum = torch.zeros(50)
    for _ in range(3):
        mean = torch.randn(50)
        parameter.grad = mean.clone()
        sgd.step()
        compiled().outer_step_(anchor, current, momentum, mean, 0.7, 0.9)
    torch.testing.assert_close(anchor[0], parameter.detach())
