"""Identifiers by pattern: what is one and what only looks like one, in any spelling and at any length."""

from __future__ import annotations

import pytest

from common.site.audit.identifiers import identifiers, keys_of, nhs_number


@pytest.mark.parametrize(
    ("text", "kind", "written"),
    [
        ("Write to Jane.Doe+1@mail.example.co.uk.", "e-mail address", "Jane.Doe+1@mail.example.co.uk"),
        ("see https://example.org/a?b=1 or not", "web address", "https://example.org/a?b=1"),
        ("DOB: 12/03/1950", "date of birth", "12/03/1950"),
        ("Date of birth is 12th of March, 1950", "date of birth", "12th of March, 1950"),
        ("she was born on March 12th, 1950", "date of birth", "March 12th, 1950"),
        ("seen on 1999-12-31.", "full date", "1999-12-31"),
        ("SSN 123-45-6789", "US social security number", "123-45-6789"),
        ("NHS 943 476 5919", "NHS number", "943 476 5919"),
        ("NHS 9434765919", "NHS number", "9434765919"),
        ("call (020) 7946 0018", "phone number", "(020) 7946 0018"),
        ("call +44 20 7946 0018", "phone number", "+44 20 7946 0018"),
        ("call 555-867-5309", "phone number", "555-867-5309"),
        ("call +49 30 901820", "phone number", "+49 30 901820"),
        ("lives at SW1A 1AA", "postcode", "SW1A 1AA"),
        ("in NY 10027-1234", "postcode", "NY 10027-1234"),
        ("record 12345678", "long number", "12345678"),
        ("Mrs. Anne-Marie O'Neill came", "full name after a title", "Anne-Marie O'Neill"),
        ("Dr Szabó came", "surname after a title", "Szabó"),
    ],
)
def test_what_is_an_identifier_is_found_as_it_is_written(text: str, kind: str, written: str) -> None:
    assert [(found.kind, found.written) for found in identifiers(text)] == [(kind, written)]


@pytest.mark.parametrize(
    "text",
    [
        "@ home, 3@4, a@b",
        "12/03 and 1/2/3/4",
        "SSN 000-12-3456 and 123-00-4567",
        "BP 120/80, temperature 37.5, ratio 1:2:3",
        "CD4 3AB and IL6 2AA",
        "on 12 March we met, in 2019",
        "the doctor, dr smith, mr jones",
        "Dr. was late",
        "3 943 476 591",
    ],
)
def test_what_only_looks_like_one_is_not(text: str) -> None:
    assert list(identifiers(text)) == []


@pytest.mark.parametrize("digits", ["9434765919", "4010232137", "0000000000"])
def test_nhs_numbers_have_a_check_digit(digits: str) -> None:
    assert nhs_number(digits)
    for wrong in "0123456789":
        assert nhs_number(digits[:9] + wrong) is (wrong == digits[9])


@pytest.mark.parametrize("digits", ["", "943476591", "94347659199", "1000000010"])
def test_other_lengths_and_a_remainder_of_ten_are_no_nhs_numbers(digits: str) -> None:
    assert not nhs_number(digits)


def test_ten_digits_with_a_wrong_check_digit_are_a_long_number() -> None:
    assert [found.kind for found in identifiers("NHS 9434765918")] == ["long number"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("born 12/03/1950", "DOB 12 March 1950"),
        ("born 12/03/1950", "1950-03-12"),
        ("12/03/1950", "March 12th, 1950"),
        ("12.03.50", "12/03/1950"),
        ("943 476 5919", "943-476-5919"),
        ("call 020 7946 0018", "call +44 (0) 20 7946 0018"),
        ("A.B@example.org", "a.b@EXAMPLE.org"),
        ("at SW1A1AA", "at SW1A 1AA"),
        ("Mr John Smith", "Dr John Smith's"),
    ],
)
def test_two_ways_to_write_one_are_one(one: str, other: str) -> None:
    [first], [second] = list(identifiers(one)), list(identifiers(other))
    assert first.key == second.key


def test_a_document_has_a_name_without_its_title() -> None:
    [found] = identifiers("Mr John Smith")
    assert found.key in keys_of("Yesterday John Smith was seen")
    assert found.key in keys_of("Saw John Smith")
    assert found.key not in keys_of("John Smithson, Little John, Smith John")


def test_an_identifier_does_not_show_itself() -> None:
    [found] = identifiers("SSN 123-45-6789")
    assert "6789" not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 500_000,
        "a." * 200_000 + "@",
        "a@" * 200_000,
        "1 " * 200_000,
        "1-" * 200_000,
        "12/" * 100_000,
        "Dr " * 100_000,
        "Aa " * 100_000,
        "born " * 200_000,
        "www." * 200_000,
        "a@b.co " * 50_000,
        "+(0" * 100_000,
    ],
)
def test_no_text_takes_more_than_linear_time(text: str) -> None:
    # In quadratic time this would take the better part of an hour, and pytest would end it.
    keys_of(text)
