"""docs/configuration.md says what the code says."""

from pathlib import Path

from training.configuration import RunConfiguration
from training.configuration_errors import known_keys
from training.reference import reference


def test_the_page_is_current() -> None:
    assert Path("docs/configuration.md").read_text(encoding="utf-8") == reference(), "type `make reference`"


def test_the_page_has_every_key() -> None:
    page = reference()
    for key in known_keys(RunConfiguration):
        section, _, name = key.rpartition(".")
        assert (f"| `{name}` |" if section else f"\n## {name}\n") in page, key
