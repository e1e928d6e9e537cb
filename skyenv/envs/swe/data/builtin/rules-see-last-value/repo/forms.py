"""Rules for the fields of a form. A rule takes a form and returns an error message or None."""


def required(field):
    """Make a rule that field is there and not empty."""

    def rule(form):
        return None if form.get(field) else "%s: is missing" % field

    return rule


def length_rules(limits):
    """Make a rule for each field of limits: its text is no longer than the limit."""
    rules = []
    for field, limit in limits.items():

        def rule(form):
            if len(form.get(field, "")) > limit:
                return "%s: longer than %d" % (field, limit)
            return None

        rules.append(rule)
    return rules


def choice_rules(choices):
    """Make a rule for each field of choices: when it is there, its value is one of those given."""
    return [
        lambda form: (
            "%s: not one of %s" % (field, ", ".join(allowed)) if form.get(field, allowed[0]) not in allowed else None
        )
        for field, allowed in choices.items()
    ]


def check(form, rules):
    """Return the messages of all rules that form breaks."""
    return [message for message in (rule(form) for rule in rules) if message]
