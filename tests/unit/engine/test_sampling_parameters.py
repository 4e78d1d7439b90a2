"""Bounds of the sampling parameters, and the bytes by which a log remembers them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import Reason, ServiceError
from baton.sampling_parameters import (
    CANONICAL_BYTES_MAX,
    LOGIT_BIAS_ENTRIES_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
    TOKENS_MAX,
    SamplingParameters,
)

DEFAULT = SamplingParameters()

parameters = st.builds(
    SamplingParameters,
    temperature=st.floats(0.0, 2.0) | st.integers(0, 2),
    top_k=st.none() | st.integers(1, 1000),
    top_p=st.floats(0.001, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.floats(0.001, 10.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    presence_penalty=st.floats(-2.0, 2.0),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(100, TOKENS_MAX),
    min_tokens=st.integers(0, 100),
    stop_strings=st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), max_size=4
    ).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.just(True),
    top_logprobs=st.integers(0, 20),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
    include_stop_string=st.booleans(),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", True),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("top_k", 0),
        ("top_k", -1),
        ("top_k", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 11),
        ("frequency_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", TOKENS_MAX + 1),
        ("min_tokens", -1),
        ("stop_strings", ("",)),
        ("stop_strings", ("x" * 1025,)),
        ("stop_strings", ("\ud800",)),
        ("stop_strings", ("x",) * (STOP_STRINGS_MAX + 1)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1,) * (STOP_TOKEN_IDS_MAX + 1)),
        ("top_logprobs", 1),
        ("logprobs", 1),
        ("ignore_eos", None),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(LOGIT_BIAS_ENTRIES_MAX + 1), 0.0)),
    ],
)
def test_value_out_of_bounds_names_its_field(field, value):
    """Every bound is checked, NaN and sizes included, and the error says where."""
    with pytest.raises(ServiceError) as caught:
        replace(DEFAULT, **{field: value}).validate()
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.field == field


def test_bounds_themselves_are_allowed():
    """One inside each limit that the test above is one past."""
    SamplingParameters(
        temperature=2.0,
        top_p=1.0,
        min_p=1.0,
        top_k=1,
        repetition_penalty=10,
        frequency_penalty=-2,
        presence_penalty=2.0,
        seed=-(2**63),
        max_tokens=TOKENS_MAX,
        min_tokens=TOKENS_MAX,
        stop_strings=("x" * 1024,) * STOP_STRINGS_MAX,
        stop_token_ids=(0,) * STOP_TOKEN_IDS_MAX,
        logprobs=True,
        top_logprobs=20,
        logit_bias=dict.fromkeys(range(LOGIT_BIAS_ENTRIES_MAX), -100.0),
    ).validate()


def test_min_tokens_above_max_tokens_is_refused():
    """No answer could satisfy both."""
    with pytest.raises(ServiceError) as caught:
        SamplingParameters(max_tokens=3, min_tokens=4).validate()
    assert caught.value.field == "min_tokens"


def test_ids_beyond_the_vocabulary_are_refused():
    """A bias or stop on a token that does not exist is a client's mistake worth telling."""
    for field, value in (("stop_token_ids", (10,)), ("logit_bias", {10: 1.0})):
        given_parameters = replace(DEFAULT, **{field: value})
        given_parameters.validate_for_vocabulary(11)
        with pytest.raises(ServiceError) as caught:
            given_parameters.validate_for_vocabulary(10)
        assert caught.value.field == field


@given(given_parameters=parameters)
def test_canonical_bytes_restore_equal_parameters(given_parameters):
    """Replay must see exactly what OPEN recorded, and equal parameters must give equal bytes."""
    given_parameters.validate()
    encoded = given_parameters.to_canonical_bytes()
    decoded = SamplingParameters.from_canonical_bytes(encoded)
    assert decoded == given_parameters
    assert decoded.to_canonical_bytes() == encoded
    reordered = dict(reversed(given_parameters.logit_bias.items()))
    assert replace(given_parameters, logit_bias=reordered).to_canonical_bytes() == encoded
    assert len(encoded) <= CANONICAL_BYTES_MAX


def test_canonical_bytes_are_stable():
    """The bytes stand in logs: a change here breaks every log written before it."""
    assert SamplingParameters(seed=7, stop_strings=("é",)).to_canonical_bytes().decode() == (
        '{"frequency_penalty":0.0,"ignore_eos":false,"include_stop_string":false,"logit_bias":[],'
        '"logprobs":false,"max_tokens":null,"min_p":0.0,"min_tokens":0,"presence_penalty":0.0,'
        '"repetition_penalty":1.0,"seed":7,"stop_strings":["é"],"stop_token_ids":[],'
        '"temperature":1.0,"top_k":null,"top_logprobs":0,"top_p":1.0,"version":1}'
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{}",
        b'{"version":1}',
        b"[" * 100_000,
        b" " * (CANONICAL_BYTES_MAX + 1),
        b"9" * 5000,
    ],
)
def test_bytes_that_are_no_parameters_are_refused(data):
    """Bytes come from files and wires; none of them may crash a worker."""
    with pytest.raises(ServiceError) as caught:
        SamplingParameters.from_canonical_bytes(data)
    assert caught.value.reason is Reason.INVALID_REQUEST
    assert caught.value.field == "sampling_parameters"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e300),
        ("temperature", None),
        ("top_k", "5"),
        ("stop_strings", "abc"),
        ("stop_strings", [1]),
        ("stop_token_ids", {"a": 1}),
        ("stop_token_ids", [[1]]),
        ("logit_bias", [[1]]),
        ("logit_bias", [[[1], 2.0]]),
        ("logit_bias", [[1, "x"]]),
    ],
)
def test_decoded_values_are_validated(field, value):
    """A well-formed object with a bad value is refused as a request would be."""
    body = json.loads(DEFAULT.to_canonical_bytes())
    body[field] = value
    with pytest.raises(ServiceError) as caught:
        SamplingParameters.from_canonical_bytes(json.dumps(body).encode())
    assert caught.value.field == field


def test_other_version_or_keys_are_refused():
    """A later version's parameters must not be half understood."""
    body = json.loads(DEFAULT.to_canonical_bytes())
    for change in ({"version": 2}, {"beam_width": 4}):
        with pytest.raises(ServiceError) as caught:
            SamplingParameters.from_canonical_bytes(json.dumps(body | change).encode())
        assert caught.value.field == "sampling_parameters"
