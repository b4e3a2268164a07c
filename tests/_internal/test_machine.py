"""Threads for JAX's logical CPU devices."""

import os

import pytest

from kdpkit._internal import machine


@pytest.mark.parametrize(
    ("cores", "devices", "threads"),
    [
        (2, 2, "4"),
        (3, 2, "4"),
        (4, 2, None),
        (2, 8, "16"),
        (16, 8, None),
        (1, 1, "2"),
        (2, 1, None),
    ],
)
def test_where_cores_are_few_each_device_has_two_threads(monkeypatch, cores, devices, threads):
    monkeypatch.setenv("PJRT_NPROC", "")  # so that it is put back
    monkeypatch.delenv("PJRT_NPROC")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    machine.reserve(devices)
    assert os.environ.get("PJRT_NPROC") == threads


def test_a_number_of_threads_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "3")
    machine.reserve(1000)
    assert os.environ["PJRT_NPROC"] == "3"
