"""Search in sorted lists."""


def find(items, wanted):
    """Return the index of wanted in the sorted items, or -1."""
    low, high = 0, len(items) - 1
    while low < high:
        mid = (low + high) // 2
        if items[mid] == wanted:
            return mid
        if items[mid] < wanted:
            low = mid + 1
        else:
            high = mid - 1
    return -1


def contains(items, wanted):
    """Return whether the sorted items hold wanted."""
    return find(items, wanted) >= 0
