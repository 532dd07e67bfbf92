"""Parses a schema of Protobuf in its text form (a ``.proto`` file), as registries return it. Pure.

Only what a value's columns depend on is kept: options, reserved numbers, extensions and services are skipped. Names of types
are left as they are written; Protobuf's descriptor pool resolves them. Syntax: proto2 without groups, and proto3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    OneofDescriptorProto,
)

from stratalog_core.errors import Invalid

DEPTH_MAX: Final = 50
TEXT_MAX: Final = 1024 * 1024
"""Characters of one file."""
_TOKEN: Final = re.compile(
    r"""
    (?P<skipped>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<token>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[-+]?[0-9.][\w.+-]*|[-+{}()\[\]<>=;:,/])
    """,
    re.VERBOSE | re.DOTALL,
)
_NAME: Final = re.compile(r"[A-Za-z_]\w*\Z")
_TYPE: Final = re.compile(r"\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z")
_OPENING: Final = {"{": "}", "[": "]", "(": ")", "<": ">"}
_SCALARS: Final[Mapping[str, int]] = {
    kind.removeprefix("TYPE_").lower(): number
    for kind, number in FieldDescriptorProto.Type.items()
    if kind not in ("TYPE_GROUP", "TYPE_MESSAGE", "TYPE_ENUM")
}
_LABELS: Final[Mapping[str, int]] = {
    "optional": FieldDescriptorProto.LABEL_OPTIONAL,
    "required": FieldDescriptorProto.LABEL_REQUIRED,
    "repeated": FieldDescriptorProto.LABEL_REPEATED,
}


def parse_proto(text: str, name: str) -> FileDescriptorProto:
    """Return the file that ``text`` describes, under ``name``. Raises ``Invalid`` that names the line."""
    return _Parser(text, name).file()


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._file = FileDescriptorProto(name=name)
        self._tokens: list[str] = []
        self._places: list[int] = []
        self._next = 0
        if len(text) > TEXT_MAX:
            raise self._invalid(f"the schema has {len(text)} characters; maximum is {TEXT_MAX}")
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._invalid(f"{text[at]!r} is unexpected", at)
            if match["token"] is not None:
                self._tokens.append(match["token"])
                self._places.append(at)
            at = match.end()

    def file(self) -> FileDescriptorProto:
        while self._peek():
            word = self._take()
            if word == "syntax":
                self._syntax()
            elif word == "package":
                self._file.package = self._package()
                self._expect(";")
            elif word == "import":
                self._import()
            elif word == "message":
                self._message(self._file.message_type.add(), 0)
            elif word == "enum":
                self._enum(self._file.enum_type.add())
            elif word in ("option", "extend", "service"):
                self._skip_statement()
            elif word != ";":
                raise self._unexpected()
        return self._file

    def _syntax(self) -> None:
        self._expect("=")
        version = self._string()
        if version not in ("proto2", "proto3"):
            raise self._invalid(f"syntax {version!r} is not supported")
        if version == "proto3":
            self._file.syntax = version
        self._expect(";")

    def _import(self) -> None:
        if self._peek() in ("public", "weak") and self._take() == "public":
            self._file.public_dependency.append(len(self._file.dependency))
        self._file.dependency.append(self._string())
        self._expect(";")

    def _message(self, message: DescriptorProto, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise self._invalid(f"messages are nested deeper than {DEPTH_MAX}")
        message.name = self._name()
        self._expect("{")
        while (word := self._take()) != "}":
            if word == "message":
                self._message(message.nested_type.add(), depth + 1)
            elif word == "enum":
                self._enum(message.enum_type.add())
            elif word == "oneof":
                self._oneof(message)
            elif word in ("option", "extend", "reserved", "extensions"):
                self._skip_statement()
            elif word != ";":
                self._field(message, word)
        _add_presence(message)

    def _oneof(self, message: DescriptorProto) -> None:
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=self._name())
        self._expect("{")
        while (word := self._take()) != "}":
            if word == "option":
                self._skip_statement()
            elif word != ";":
                self._field(message, word).oneof_index = index

    def _field(self, message: DescriptorProto, word: str) -> FieldDescriptorProto:
        field = message.field.add(label=_LABELS.get(word, FieldDescriptorProto.LABEL_OPTIONAL))
        # In proto3 only fields with this label have presence; a synthetic oneof says so.
        field.proto3_optional = word == "optional" and self._file.syntax == "proto3"
        kind = self._take() if word in _LABELS else word
        if kind == "map" and self._peek() == "<":
            self._map(message, field)
        else:
            self._set_type(field, kind)
            field.name = self._name()
        self._expect("=")
        field.number = self._number()
        if self._peek() == "[":
            self._skip_group()
        self._expect(";")
        return field

    def _map(self, message: DescriptorProto, field: FieldDescriptorProto) -> None:
        self._expect("<")
        keys = self._take()
        self._expect(",")
        values = self._take()
        self._expect(">")
        field.name, field.label = self._name(), FieldDescriptorProto.LABEL_REPEATED
        entry = message.nested_type.add(name="".join(part[:1].upper() + part[1:] for part in field.name.split("_")) + "Entry")
        entry.options.map_entry = True
        for number, (name, kind) in enumerate((("key", keys), ("value", values)), 1):
            self._set_type(entry.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL), kind)
        field.type_name, field.type = entry.name, FieldDescriptorProto.TYPE_MESSAGE

    def _set_type(self, field: FieldDescriptorProto, kind: str) -> None:
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        elif kind == "group" or not _TYPE.match(kind):
            raise self._unexpected()
        else:
            field.type_name = kind

    def _enum(self, enum: EnumDescriptorProto) -> None:
        enum.name = self._name()
        self._expect("{")
        while (word := self._take()) != "}":
            if word == "option" and self._peek() != "=":
                # Aliases are the one option without which an enum is refused.
                enum.options.allow_alias |= self._peek() == "allow_alias"
                self._skip_statement()
            elif word == "reserved" and self._peek() != "=":
                self._skip_statement()
            elif word != ";":
                self._expect("=")
                enum.value.add(name=word, number=self._number())
                if self._peek() == "[":
                    self._skip_group()
                self._expect(";")

    def _skip_statement(self) -> None:
        """Skip up to a semicolon, or up to the end of a block that is not followed by one."""
        while (word := self._peek()) != ";":
            if word in _OPENING:
                self._skip_group()
                if word == "{":
                    return
            else:
                self._take()
        self._take()

    def _skip_group(self) -> None:
        """Skip a group in brackets, with those within."""
        ends = [_OPENING[self._take()]]
        while ends:
            word = self._take()
            if word in _OPENING:
                ends.append(_OPENING[word])
            elif word in _OPENING.values() and word != ends.pop():
                raise self._unexpected()

    def _name(self) -> str:
        if not _NAME.match(word := self._take()):
            raise self._unexpected()
        return word

    def _package(self) -> str:
        if not _TYPE.match(word := self._take()):
            raise self._unexpected()
        return word

    def _string(self) -> str:
        word = self._take()
        if word[0] not in "\"'" or "\\" in word:
            raise self._unexpected()
        return word[1:-1]

    def _number(self) -> int:
        sign = -1 if self._peek() == "-" else 1
        if sign < 0:
            self._take()
        word = self._take()
        try:
            number = sign * int(word, 8 if re.match(r"-?0[0-7]", word) else 0)
        except ValueError:
            raise self._unexpected() from None
        if not -(2**31) <= number < 2**31:
            raise self._unexpected()
        return number

    def _expect(self, token: str) -> None:
        if self._take() != token:
            raise self._unexpected()

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        if self._next >= len(self._tokens):
            raise self._invalid("it ends too early")
        self._next += 1
        return self._tokens[self._next - 1]

    def _unexpected(self) -> Invalid:
        """Return the error for the token that was taken last."""
        return self._invalid(f"{self._tokens[self._next - 1]!r} is unexpected")

    def _invalid(self, problem: str, at: int | None = None) -> Invalid:
        place = at if at is not None else self._places[self._next - 1] if self._next else 0
        line = self._text.count("\n", 0, place) + 1
        return Invalid(f"{self._file.name}, line {line}: {problem}")


def _add_presence(message: DescriptorProto) -> None:
    """Add the synthetic oneof of each optional field of proto3. They come after all others."""
    for field in message.field:
        if field.proto3_optional:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.append(OneofDescriptorProto(name=f"_{field.name}"))
