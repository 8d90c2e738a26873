"""A claim is printed in four lines, and only those that hang on this machine are marked as measured."""

import pytest

from minillm.course.claims import check_claim


def test_what_was_measured_and_its_verdict_are_marked(capsys):
    check_claim("A7", "prefill is fast", sum="2 x 2 = 4", measured="3 s", verdict="holds here")
    assert capsys.readouterr().out.splitlines() == [
        "claim A7: prefill is fast",
        "sum: 2 x 2 = 4",
        "~ measured here: 3 s",
        "~ verdict: holds here",
    ]


def test_a_verdict_by_counting_alone_is_the_same_everywhere(capsys):
    check_claim("A6", "4M values", sum="2,048 x 2,048 = 4,194,304", verdict="holds for one head")
    assert capsys.readouterr().out.splitlines()[2:] == ["verdict: holds for one head"]


@pytest.mark.parametrize("idea", ["A0", "A21", "7", "a7"])
def test_an_idea_that_the_article_does_not_have_is_refused(idea):
    with pytest.raises(ValueError, match="A1 to A20"):
        check_claim(idea, "c", sum="s", verdict="v")


def test_a_claim_without_a_verdict_is_refused():
    with pytest.raises(ValueError, match="needs a verdict"):
        check_claim("A1", "c", sum="s", measured="m")
