"""Words of a text."""


def split_words(text):
    """Return the words of text in lower case."""
    return [word.strip(".,;:!?").lower() for word in text.split()]


def count_words(text):
    """Return how often each word occurs."""
    counts = {}
    for word in split_words(text):
        if word:
            counts[word] = 1
    return counts
