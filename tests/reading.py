"""What the tests of documents share: a corpus read in full, and files to read."""

from data.documents import Corpus
from data.sources import open_corpus


def read(*names, **options) -> tuple[list[str], dict, Corpus]:
    """Documents in full, the events that count, the corpus."""
    corpus = open_corpus([str(name) for name in names], **options)
    documents: list[str] = []
    for index, text in corpus.documents():
        assert text
        if index == len(documents):
            documents.append("")
        assert index == len(documents) - 1
        documents[index] += text
    return documents, {event: n for event, n in corpus.events.items() if n}, corpus


def write(path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path
