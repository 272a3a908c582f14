"""What is entered where a rank waits for others, so that the time can be measured."""

from collections.abc import Callable
from contextlib import AbstractContextManager

Waiting = Callable[[], AbstractContextManager]
