"""Provides the tiny data sets of the training's tests."""

from tests.training.conftest import data as data
from tests.training.conftest import large as large
