"""Questions and answers made from the corpus, in the chat template's form.

An answer is the beginning of the document itself, cut at a paragraph. Nothing is made up: only the
question's wording comes from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_afd.embedded.corpus import Document

ANSWER_LIMIT = 900  # characters, about 300 tokens: an answer ends within a demo's budget

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Python.",
)

_TOPIC_QUESTIONS = (
    "Explain {s}.",
    "Explain {s} in Python.",
    "What is {s}?",
    "What is {s} in Python?",
    "What are {s}?",
    "Describe {s}.",
    "How does {s} work?",
    "How do {s} work in Python?",
    "Tell me about {s}.",
    "Tell me about {s} in Python.",
    "Can you explain {s}?",
    "Please explain {s} to me.",
    "What does the Python documentation say about {s}?",
    "{s}",
)
_DOCSTRING_QUESTIONS = (
    "What does `{s}` do?",
    "What is `{s}`?",
    "Explain `{s}`.",
    "Describe {s}.",
    "How do I use `{s}`?",
    "help({s})",
)


@dataclass(frozen=True)
class Exchange:
    """One answer and every wording of the question that leads to it."""

    questions: tuple[str, ...]
    answer: str


def exchanges(documents: list[Document]) -> tuple[list[Exchange], list[Exchange]]:
    """Exchanges for every (topic, docstring) that is trained on.

    A question asked of both, such as "What is `dict`?", is left to the topic.
    """
    trained = [d for d in documents if not d.held_out]
    topics = [Exchange(_topic_questions(d), answer(d)) for d in trained if d.kind == "topic"]
    taken = {question for exchange in topics for question in exchange.questions}
    docstrings = []
    for document in trained:
        if document.kind == "docstring":
            wordings = (q.format(s=document.name) for q in _DOCSTRING_QUESTIONS)
            questions = tuple(q for q in wordings if q not in taken)
            docstrings.append(Exchange(questions, answer(document)))
    return topics, docstrings


def answer(document: Document) -> str:
    """The document's first paragraphs, at least one, up to :data:`ANSWER_LIMIT` characters.

    A topic's underlined title is left out. No answer ends on a line that announces what the cut
    took away ("The following code:").
    """
    paragraphs = document.text.strip().split("\n\n")
    if document.kind == "topic" and len(paragraphs) > 1:
        paragraphs = paragraphs[1:]
    kept = [paragraphs[0]]
    for paragraph in paragraphs[1:]:
        if len("\n\n".join(kept)) + len(paragraph) > ANSWER_LIMIT:
            break
        kept.append(paragraph)
    while len(kept) > 1 and kept[-1].rstrip().endswith(":"):
        kept.pop()
    return "\n\n".join(kept)


def _topic_questions(document: Document) -> tuple[str, ...]:
    title = document.name
    if title.startswith("The "):
        title = "the " + title[4:]
    subjects = {
        title.replace('"', "`"),
        title.replace('"', ""),
        title.replace('"', "").lower(),
        f"`{document.group}`",
    }
    return tuple(q.format(s=s) for s in sorted(subjects) for q in _TOPIC_QUESTIONS)
