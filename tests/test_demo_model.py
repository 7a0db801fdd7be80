"""The demo's model: the same tokens over any number of shards, in any batch, in any process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import fastipc
from fastipc.demo import model

PACKAGE = Path(fastipc.__file__).parent


@pytest.fixture(scope="module")
def weights():
    return model.train(model.read(PACKAGE), seed=7)


def rows_of(prompts):
    n = len(prompts)
    return model.Rows(
        np.stack([model.context_of(prompt) for prompt in prompts]),
        np.array([len(prompt) for prompt in prompts]),
        np.arange(n) * 12345,
        np.array([(0, 128, 256)[i % 3] for i in range(n)]),
    )


def image_of(level):
    image = np.full((3, 40, 61), level, np.uint8)
    image[1, :20] = 255 - level
    return image


@pytest.mark.parametrize("shards", [2, 3, 7, 128])
def test_the_tokens_do_not_depend_on_the_shards_nor_on_the_batch(weights, shards):
    text = model.read(PACKAGE)
    rows = rows_of([text[:i] for i in range(0, 2000, 41)])
    images = [image_of(i) if i % 4 == 0 else None for i in range(len(rows.seeds))]
    whole = model.Shard(weights, 0, 1)
    parts = [model.Shard(weights, rank, shards) for rank in range(shards)]
    assert sum(part.weights.scores.shape[1] for part in parts) == model.VOCABULARY

    def seen(part):
        return [None if image is None else part.see(image) for image in images]

    together = model.best([part.propose(rows, seen(part)) for part in parts])
    biases = seen(whole)
    for i, token in enumerate(together):
        alone = model.Rows(*(column[i : i + 1] for column in rows))
        assert int(model.best([whole.propose(alone, biases[i : i + 1])])[0]) == token
    assert len(set(together.tolist())) > 10


def test_another_process_trains_the_same_weights(weights, run_child):
    printed = run_child(
        """
        import sys
        from pathlib import Path
        from fastipc.demo import model
        weights = model.train(model.read(Path(sys.argv[1])), seed=7)
        shard = model.Shard(weights, 0, 1)
        print(weights.digest(), model.generate(shard, [model.Job(b"def ", 50, 3)])[0].hex())
        """,
        PACKAGE,
    )
    shard = model.Shard(weights, 0, 1)
    assert printed.split() == [
        weights.digest(),
        model.generate(shard, [model.Job(b"def ", 50, 3)])[0].hex(),
    ]
    assert model.train(model.read(PACKAGE), seed=8).digest() != weights.digest()


def test_it_has_learnt_its_text(weights):
    shard = model.Shard(weights, 0, 1)

    def follows(prompt, tokens):
        (said,) = model.generate(shard, [model.Job(prompt, tokens, temperature=0)])
        return said

    assert follows(b"\nimport nump", 1) == b"y"
    # Greedy and without an image, what follows is what the text has most often there.
    assert follows(b"\nfrom __fut", 4) == b"ure_"


def test_an_image_and_a_seed_change_what_is_said(weights):
    shard = model.Shard(weights, 0, 1)
    jobs = [
        model.Job(b"def ", 60, seed, image=image)
        for seed in (1, 2)
        for image in (None, image_of(0), image_of(255))
    ]
    assert len(set(model.generate(shard, jobs))) == 6


def test_many_at_once_are_as_each_alone(weights):
    shard = model.Shard(weights, 0, 1)
    text = model.read(PACKAGE)
    jobs = [
        model.Job(text[i : i * 2], i % 9, i, i * 3, image_of(i) if i % 4 == 0 else None)
        for i in range(150)
    ]
    said = model.generate(shard, jobs)
    assert [len(tokens) for tokens in said] == [job.max_tokens for job in jobs]
    assert said == [model.generate(shard, [job])[0] for job in jobs]


def test_the_probabilities_add_up(weights):
    unit = np.exp(weights.scores.astype(float) / model.LOG_ONE)
    unit[weights.scores == model.UNKNOWN] = 0
    sums = unit.sum(axis=1)
    # Each is rounded down to a unit of 2^-15, or up to the first unit.
    assert (np.abs(sums - 1) < 128 * 2**-15 + 0.01).all()


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(model.NothingToRead, match="no such file"):
        model.read(tmp_path / "nowhere")
    with pytest.raises(model.NothingToRead, match="no text"):
        model.read(tmp_path)
    os.mkfifo(tmp_path / "pipe.txt")  # a read of it would hang
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "b.txt").write_text("Grüße, 世界\n")
    (tmp_path / "a.py").write_text("    x = 1\n")
    (tmp_path / "c.bin").write_bytes(b"\xff" * 100)
    assert model.read(tmp_path) == b"\tx = 1\nGr??e, ??\n"
    assert model.detokenize(b"\tx") == "    x"


def test_reading_stops_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "READ_BYTES", 30)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 20)
    assert model.read(tmp_path) == b"a" * 20 + b"b" * 10


def test_a_model_of_next_to_nothing_works():
    shard = model.Shard(model.train(b"ab"), 0, 1)
    assert set(model.generate(shard, [model.Job(b"", 20)])[0]) <= set(b"ab")


@pytest.mark.parametrize("text", [b"", b"\xff" * 10], ids=["empty", "no tokens"])
def test_text_that_is_not_tokens_is_refused(text):
    with pytest.raises(ValueError, match="tokenize"):
        model.train(text)


def test_bad_shapes_are_named(weights):
    with pytest.raises(ValueError, match="shard 2 of 2"):
        model.Shard(weights, 2, 2)
    shard = model.Shard(weights, 0, 1)
    for bad in (np.zeros((3, 2, 9), np.uint8), np.zeros((4, 9, 9), np.uint8), np.zeros(3)):
        with pytest.raises(ValueError, match=r"an image is uint8 \(3, height, width\)"):
            shard.see(bad)
