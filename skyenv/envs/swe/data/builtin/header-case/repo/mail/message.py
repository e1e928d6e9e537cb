"""Reading and writing of messages."""

from mail.headers import Headers


class Message:
    def __init__(self, headers, body=b""):
        self.headers = headers
        self.body = body

    @property
    def charset(self):
        """Return the charset that the content type names, else utf-8."""
        for part in self.headers.get("Content-Type", "").split(";")[1:]:
            name, _, value = part.partition("=")
            if name.strip() == "charset":
                return value.strip().strip('"')
        return "utf-8"

    @property
    def text(self):
        """Return the body as text."""
        return self.body.decode(self.charset)


def parse(data):
    """Return the message in data: header lines, an empty line, and as many bytes as Content-Length says."""
    head, _, rest = data.partition(b"\r\n\r\n")
    fields = dict(line.split(":", 1) for line in head.decode("ascii").split("\r\n") if line)
    headers = Headers(fields.items())
    length = int(fields.get("Content-Length", 0))
    return Message(headers, rest[:length])


def forward(message, by):
    """Return the bytes of message with a line on top that says who passed it on."""
    lines = ["Received: by " + by]
    lines += ["%s: %s" % pair for pair in message.headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + message.body
