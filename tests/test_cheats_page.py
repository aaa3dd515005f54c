from collections import Counter

from cheats.corpus import load
from cheats.page import PAGE, page


def test_the_page_of_cheats_is_that_of_the_corpus():
    assert PAGE.read_text() == page(), "docs/cheats.md is not up to date: cd tests && python -m cheats.page"


def test_the_corpus_has_cheats_of_every_class_and_honest_backends():
    groups = Counter(entry.group for entry in load())
    honest = groups.pop("honest")
    assert honest >= 30 and groups.total() >= 90
    assert min(groups.values()) >= 3, groups
