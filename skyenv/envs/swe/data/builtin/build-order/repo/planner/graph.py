"""Orders of graphs."""


def topological(edges):
    """Return the nodes of edges so that each comes after its successors, else in the order of the keys.

    Raises ValueError with the nodes of a cycle as its only argument, the first one repeated at the end.
    """
    order = []
    done = set()

    def visit(node):
        if node in done:
            return
        done.add(node)
        order.append(node)
        for successor in edges[node]:
            if successor in edges:
                visit(successor)

    for node in edges:
        visit(node)
    return order
