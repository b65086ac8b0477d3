"""The log gets what was written, through whatever package is installed."""

import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from graftree.interop.flax_side import summary_writers

PACKAGES = ("tensorboardX", "torch.utils.tensorboard", "torch", "tensorflow")


@pytest.fixture(autouse=True)
def without_packages(monkeypatch):
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)


class Recorder:
    """Notes the calls of methods, as tensorboardX has them."""

    def __init__(self, log_dir):
        self.calls = [("open", log_dir)]

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, kwargs))


@pytest.fixture
def writer(monkeypatch):
    package = types.SimpleNamespace(SummaryWriter=Recorder)
    monkeypatch.setitem(sys.modules, "tensorboardX", package)
    return summary_writers.SummaryWriter("logs", auto_flush=False)


def calls(writer):
    return writer._backend.calls


def test_scalars_may_be_arrays(writer):
    writer.scalar("loss", jnp.array([0.5]), 3)
    assert calls(writer) == [("open", "logs"), ("add_scalar", "loss", 0.5, 3, {})]


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3), (6, 4, 5, 3)])
def test_images_are_batches_of_at_most_max_outputs(writer, shape):
    writer.image("input", np.zeros(shape, np.int32), 1, max_outputs=2)
    name, _, pixels, step, options = calls(writer)[-1]
    count = min(2, shape[0] if len(shape) == 4 else 1)
    assert (name, step, pixels.shape) == ("add_images", 1, (count, 4, 5, 3))
    assert pixels.dtype == np.uint8 and options == {"dataformats": "NHWC"}


def test_other_shapes_are_no_images(writer):
    with pytest.raises(ValueError, match=r"got the shape \(3,\)"):
        writer.image("input", np.zeros(3), 1)


def test_text_histograms_and_settings(writer):
    writer.text("note", "hello", 1)
    writer.histogram("weights", jnp.ones((2, 2)), 2, bins=4)
    writer.hparams({"rate": 0.1, "depth": 2})
    text, histogram, settings = calls(writer)[1:]
    assert text == ("add_text", "note", "hello", 1, {})
    assert histogram[3:] == (2, {"bins": 4}) and histogram[2].shape == (4,)
    assert settings[2] == "depth: 2  \nrate: 0.1"


def test_each_call_is_flushed_by_default(writer):
    flushing = summary_writers.SummaryWriter("logs")
    flushing.scalar("loss", 1.0, 1)
    flushing.close()
    assert [call[0] for call in calls(flushing)[2:]] == ["flush", "close"]


def test_tensorflow_is_used_if_it_is_all_there_is(monkeypatch):
    written = []

    class Writer:
        def as_default(self):
            return self

        def __enter__(self):
            pass

        def __exit__(self, *exception):
            pass

        flush = close = __enter__

    summary = types.SimpleNamespace(
        create_file_writer=lambda log_dir: Writer(),
        scalar=lambda *args, **kwargs: written.append((args, kwargs)),
    )
    package = types.SimpleNamespace(summary=summary)
    monkeypatch.setitem(sys.modules, "tensorflow", package)
    summary_writers.SummaryWriter("logs").scalar("loss", 0.5, 3)
    assert written == [(("loss", 0.5), {"step": 3})]


def test_without_any_package_the_error_names_them():
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        summary_writers.SummaryWriter("logs")
