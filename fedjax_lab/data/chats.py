"""Instructions and chats: from JSON, Parquet or a table of records to the rows of each client.

The fields of a record decide its form, in this order; fields that are null count as missing:

1. ``messages``, ``conversations`` or ``conversation``: a list of messages. A message is {"role":
   ..., "content": ...} or, as in ShareGPT, {"from": ..., "value": ...}. A content is text, or a
   list of parts {"type": "text", "text": ...}, whose texts are joined. ``"weight": 0`` leaves an
   assistant's message out of the loss.
2. A question and its answer: ``instruction`` and ``output`` or ``response`` (Alpaca, Dolly), with
   ``input`` or ``context`` after the instruction if it is not empty; or ``prompt`` and
   ``completion`` or ``response``.
3. ``text``: plain text, in which every token is scored.

``system`` or ``system_prompt`` is a system message before the forms 1 and 2. All other fields, such
as Alpaca's ``text`` beside its instruction and output, are ignored. Refused as ambiguous: two lists
of messages, two complete pairs, ``text`` beside an incomplete pair, and ``input`` or ``context``
where nothing says how to join it. Refused because it is not read: ``history``, tools, images.

In the forms 1 and 2, the assistant's messages and the tokens that end them are scored. An empty
answer is the token that ends it.
"""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_lab.checks import check_choice, errors_about
from fedjax_lab.data.cells import check_text
from fedjax_lab.data.clients import from_clients
from fedjax_lab.data.federated import FederatedArrays
from fedjax_lab.data.files import open_text, read_parquet
from fedjax_lab.data.packing import Sentence, pack
from fedjax_lab.data.sources import Examples
from fedjax_lab.machine.extras import imported
from fedjax_lab.signatures import suggest_keywords

Records = str | Path | Iterable[Mapping[str, Any]]
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_LISTS = ("messages", "conversations", "conversation")
_PAIRS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
)
_CONTEXTS = ("input", "context")
_SYSTEM = ("system", "system_prompt")
# What would change a conversation, in a record and in a message.
_UNREAD = ("history", "tools", "functions", "image", "images", "audio", "videos")
_UNREAD_IN_MESSAGE = (
    "tool_calls",
    "function_call",
    "reasoning_content",
    "image",
    "images",
    "audio",
)

_LIKE_SPECIAL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_STAND_IN = "\u4dc0"  # a symbol that normalizers leave as it is


class Template(NamedTuple):
    """The text around messages.

    Attributes:
      start: text before a conversation.
      before: text before each message; "{role}" is replaced by the role.
      end: text after each message; it is scored if the message is.
      gap: text between messages.
      trim: whether white space around a message is removed, as some models' own templates do.
      plain: texts that look like special tokens, such as "<|user|>", and are none: the tokenizer
        may divide them. All others must be tokens of the tokenizer.
    """

    start: str
    before: str
    end: str
    gap: str
    trim: bool = False
    plain: tuple[str, ...] = ()


TEMPLATES = {
    "chatml": Template("", "<|im_start|>{role}\n", "<|im_end|>", "\n"),  # Qwen2 and others
    "llama3": Template(
        "<|begin_of_text|>",
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "",
        trim=True,
    ),
}


def load_tokenizer(file: str | Path) -> Any:
    """Read a tokenizer of the library ``tokenizers``, such as a model's ``tokenizer.json``.

    Args:
      file: a JSON file; or a folder that contains ``tokenizer.json``.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged.
      ImportError: the package tokenizers is missing.
    """
    kind = _tokenizer_class()
    path = Path(file)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    with errors_about(f"{path} is no tokenizer"):
        return kind.from_file(str(path))


@suggest_keywords
def from_chats(
    records: Records,
    tokenizer: Any,
    *,
    client: str,
    length: int,
    template: str | Template = "chatml",
    too_long: str = "error",
    min_size: int = 1,
) -> FederatedArrays:
    """Pack the conversations of each client into rows, and put them on the device.

    ::

        tokenizer = data.load_tokenizer("qwen2-0.5b")
        clients = data.from_chats("chats.jsonl", tokenizer, client="user", length=512)
        loss_fn = models.answer_loss(model.apply)

    Args:
      records: a file of JSON lines, a file that is one JSON array, or a .parquet file; or an
        iterable of records, such as a ``Dataset`` of Hugging Face's ``datasets``.
      tokenizer: a ``Tokenizer`` of the library ``tokenizers``, or a fast one of ``transformers``.
        Each conversation is tokenized in one piece, as ``apply_chat_template`` does; special tokens
        that a message contains stay text. Truncation and padding of the tokenizer are ignored.
      client: field with the client's id, text or an integer.
      length, too_long: as in ``pack``.
      template: "chatml", "llama3", or a ``Template``. Its special tokens must be tokens of the
        tokenizer. The default system prompt that some models' own templates add is not added.
      min_size: smallest number of rows of a client.

    A token that contains characters of a scored message and of the text before it is scored.

    Returns:
      The clients in the order of their first occurrence, with their ids as ``names``; an example is
      a row.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: ``tokenizer`` is of another kind.
      ValueError: a line is not a JSON object; a record has none of the forms, or more than one, or
        lacks the field; the tokenizer lacks special tokens of the template; or as in ``pack`` and
        ``from_clients``.
      ImportError: the package tokenizers, or pyarrow for a Parquet file, is missing.
    """
    encoder = _Encoder(tokenizer, template)
    of_client: dict[str, list[Sentence]] = {}
    for where, record in _numbered(records):
        name = record.get(client)
        if isinstance(name, bool) or not isinstance(name, (str, Integral)):
            raise ValueError(f"{where}: {client!r} is {name!r}; it must be text or an integer.")
        of_client.setdefault(str(name), []).append(encoder.sentence(where, record))
    packed = {}
    for name, sentences in of_client.items():
        with errors_about(f"client {name!r}", ValueError):
            packed[name] = pack(sentences, length, too_long=too_long)
    return from_clients(packed, min_size=min_size)


@suggest_keywords
def pack_chats(
    records: Records,
    tokenizer: Any,
    *,
    length: int,
    template: str | Template = "chatml",
    too_long: str = "error",
) -> Examples:
    """Pack conversations without clients into rows, for example for evaluation.

    Args:
      records, tokenizer, length, template, too_long: as in ``from_chats``.

    Raises:
      FileNotFoundError, TypeError, ValueError, ImportError: as ``from_chats``.
    """
    encoder = _Encoder(tokenizer, template)
    sentences = [encoder.sentence(where, record) for where, record in _numbered(records)]
    return pack(sentences, length, too_long=too_long)


def _numbered(records: Records) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (location for errors, record)."""
    for where, record in _located(records):
        if not isinstance(record, Mapping):
            raise ValueError(
                f"{where} is a {type(record).__name__}; it must be an object {{field: value}}. "
                'Of a data frame, give its rows: df.to_dict("records").'
            )
        yield where, record


def _located(records: Records) -> Iterator[tuple[str, Any]]:
    """Yield (location, what is there) of a file of JSON lines or of one JSON array, and others."""
    if not isinstance(records, str | Path):
        yield from ((f"records[{number}]", record) for number, record in enumerate(records))
        return
    path = Path(records)
    if not path.is_file():
        raise FileNotFoundError(f"records is {str(path)!r}; there is no such file.")
    if path.suffix == ".parquet":
        rows = read_parquet("records", path).to_pylist()
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
        return
    with open_text(path) as file:
        text = file.read()
    if text.lstrip().startswith("["):
        parts = enumerate(_parsed(str(path), text), start=1)
        yield from ((f"{path}, record {number}", part) for number, part in parts)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _parsed(where, line)


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: no JSON: {error}. Each line must be a JSON object, or the file one array of "
            "them."
        ) from error


# --- tokens


class _Encoder:
    """Tokenizes conversations, each in one piece.

    What precedes a word decides its first token in many tokenizers, so the parts of a conversation
    cannot be tokenized one by one. Special tokens inside messages have to stay text: the copy of
    the tokenizer knows none. The template's own are written as stand-ins, tokens that are not
    special, and replaced afterwards.

    Args:
      tokenizer, template: as in ``from_chats``.
    """

    def __init__(self, tokenizer: Any, template: str | Template):
        if isinstance(template, str):
            template = TEMPLATES[check_choice("template", template, TEMPLATES)]
        if not isinstance(template, Template):
            raise TypeError(
                f"template is a {type(template).__name__}; it must be one of "
                f"{', '.join(TEMPLATES)}, or a data.Template."
            )
        self._template, self._tokenizer = template, _copied(tokenizer)
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token.content: (number, token) for number, token in added.items()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._stand_ins: dict[str, str] = {}  # special token -> its stand-in
        self._marks_of: dict[str, int] = {}  # stand-in -> number of the special token

    def sentence(self, where: str, record: Mapping[str, Any]) -> Sentence:
        """Tokenize a record.

        Raises:
          ValueError: as ``from_chats``.
        """
        text = ""
        is_scored: list[bool] = []  # of each character
        marks: list[bool] = []  # of each special token of the template
        for written, scored, is_content in self._parts(where, record):
            if not is_content:
                written, count = self._with_stand_ins(written)
                marks += [scored] * count
            text += written
            is_scored += [scored] * len(written)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        # By their text: in a vocabulary with gaps, a new token may get the number of another. A
        # special token may include the white space beside it.
        named = [token.strip() for token in found.tokens]
        if typed := [token for token in named if token in self._stand_ins]:
            raise ValueError(
                f"{where}: a message contains {typed[0]!r}, which is a special token of the "
                "template, and which this tokenizer cannot encode as text."
            )
        places = [place for place, token in enumerate(named) if token in self._marks_of]
        if len(places) != len(marks):
            raise ValueError(
                f"{where}: the tokenizer finds {len(places)} of the {len(marks)} special tokens "
                "that the template writes; it does not keep them apart from the text around them."
            )
        tokens = np.array(found.ids, np.int64)
        before = np.cumsum([0, *is_scored])  # scored characters before each place
        starts, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T
        flags = before[np.clip(ends, starts + 1, len(text))] > before[starts]
        tokens[places] = [self._marks_of[named[place]] for place in places]
        flags[places] = marks
        if not flags[1:].any():
            raise ValueError(f"{where}: the assistant says nothing that is scored.")
        return Sentence(tokens, flags)

    def _parts(self, where: str, record: Mapping[str, Any]) -> Iterator[tuple[str, bool, bool]]:
        """Yield the parts of a conversation: (text, whether it is scored, whether it is a content).

        What is no content is text of the template, which may have special tokens.
        """
        template, gap = self._template, ""
        yield template.start, False, False
        for role, content, scored in _messages(where, record):
            if role:
                yield gap + template.before.replace("{role}", role), False, False
                content = content.strip() if template.trim else content
            yield content, scored, True
            yield template.end, scored, False
            gap = template.gap

    def _with_stand_ins(self, text: str) -> tuple[str, int]:
        """Replace special tokens of the template by stand-ins; also count them."""
        rest = self._special.sub("\n", text)
        for plain in self._template.plain:
            rest = rest.replace(plain, "\n")
        if missing := list(dict.fromkeys(_LIKE_SPECIAL.findall(rest))):
            raise ValueError(
                f"template has {', '.join(map(repr, missing))}, which the tokenizer does not have "
                "as tokens. Choose the template of the tokenizer's model; or name what is plain "
                "text in data.Template(..., plain=...)."
            )
        return self._special.subn(lambda mark: self._stand_in(mark[0]), text)

    def _stand_in(self, mark: str) -> str:
        if mark not in self._stand_ins:
            from tokenizers import AddedToken

            number, token = self._added[mark]
            new = _STAND_IN * 3 + chr(ord(_STAND_IN) + 1 + len(self._stand_ins))
            alike = AddedToken(
                new,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=False,
            )
            self._tokenizer.add_tokens([alike])
            self._stand_ins[mark] = new
            self._marks_of[new] = number
        return self._stand_ins[mark]


def _tokenizer_class() -> Any:
    needs = "a tokenizer needs the package tokenizers"
    return imported("tokenizers", needs, "pretrained").Tokenizer


def _copied(tokenizer: Any) -> Any:
    """Copy a tokenizer, without truncation, padding and trimmed offsets."""
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)  # of transformers
    inner = getattr(inner, "_tokenizer", inner)  # of tokenizers' ready-made classes
    if not isinstance(inner, _tokenizer_class()):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}; it must be a Tokenizer of the library "
            "tokenizers, such as data.load_tokenizer reads, or a fast tokenizer of transformers."
        )
    found = copy.deepcopy(inner)
    found.no_truncation()
    found.no_padding()
    found.post_processor = None
    return found


# --- forms


class _Message(NamedTuple):
    role: str  # "" of plain text, which has no messages
    content: str
    scored: bool = False


def _messages(where: str, record: Mapping[str, Any]) -> list[_Message]:
    """Return a record's messages; plain text is one."""
    there = [name for name, value in record.items() if value is not None]
    if unread := [name for name in _UNREAD if not _is_empty(record.get(name))]:
        raise ValueError(
            f"{where} has {unread[0]}, which is not read and would change the conversation. Write "
            "it into the messages, or leave it out."
        )
    lists = [name for name in _LISTS if name in there]
    pairs = [pair for pair in _PAIRS if {*pair} <= {*there}]
    if len(lists) > 1 or (not lists and len(pairs) > 1):
        fields = lists or dict.fromkeys(name for pair in pairs for name in pair)
        raise ValueError(
            f"{where} has {', '.join(fields)}, which are several conversations; leave out all but "
            "one."
        )
    if lists:
        messages = _listed(where, lists[0], record[lists[0]])
    elif pairs:
        messages = _asked(where, record, *pairs[0])
    elif "text" in there and not ({*there} & {name for pair in _PAIRS for name in pair}):
        if any(not _is_empty(record.get(name)) for name in _SYSTEM):
            raise ValueError(f"{where} has text and a system prompt; text has no messages.")
        return [_Message("", _text(where, "text", record["text"]), scored=True)]
    else:
        null = [f"{name} (null)" for name in record if name not in there]
        raise ValueError(
            f"{where} has {sorted(map(str, [*there, *null]))}; it must have messages or "
            "conversations, or instruction and output or response, or prompt and completion or "
            "response, or none of these and text."
        )
    for name in _SYSTEM:
        if _is_empty(record.get(name)):
            continue
        if messages[0].role == "system":
            raise ValueError(f"{where} has {name} and a system message; leave out one.")
        messages = [_Message("system", _text(where, name, record[name])), *messages]
    return messages


def _listed(where: str, name: str, messages: Any) -> list[_Message]:
    if not isinstance(messages, (list, tuple, np.ndarray)) or not len(messages):
        raise ValueError(f"{where}: {name} is {messages!r}; it must be a list of messages.")
    found = []
    for message in messages:
        given = message if isinstance(message, Mapping) else {}
        who, what = ("role", "content") if given.get("role") is not None else ("from", "value")
        role, weight = given.get(who), given.get("weight")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(
                f"{where}: a message is {message!r}; it must have a role, one of "
                f"{', '.join(ROLES)}, and a content (or from and value)."
            )
        if unread := [key for key in _UNREAD_IN_MESSAGE if not _is_empty(given.get(key))]:
            raise ValueError(f"{where}: a message has {unread[0]}, which is not read.")
        if weight not in (None, 0, 1):
            raise ValueError(f"{where}: a message has weight {weight!r}; it must be 0 or 1.")
        role = ROLES[role]
        scored = role == "assistant" and weight != 0
        found.append(_Message(role, _content(where, what, given.get(what)), scored))
    return found


def _asked(where: str, record: Mapping[str, Any], question: str, answer: str) -> list[_Message]:
    asked = _text(where, question, record[question])
    contexts = [name for name in _CONTEXTS if not _is_empty(record.get(name))]
    if len(contexts) > 1 or (contexts and question == "prompt"):
        raise ValueError(
            f"{where} has {' and '.join(contexts)} beside {question}; join them to one {question}, "
            "or leave out what is no part of it."
        )
    for name in contexts:
        asked = f"{asked}\n\n{_text(where, name, record[name])}"
    answered = _text(where, answer, record[answer])
    return [_Message("user", asked), _Message("assistant", answered, scored=True)]


def _content(where: str, field: str, value: Any) -> str:
    """Return the text of a content, which may be a list of parts."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return _text(where, field, value)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(
                f"{where}: {field} has a part of the type {kind!r}; only parts of the type 'text' "
                "are read."
            )
        texts.append(_text(where, "text", part.get("text")))
    return "".join(texts)


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


def _text(where: str, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: {field} is {value!r}; it must be text.")
    return check_text(f"{where}: {field}", value)
