"""What a shell is told to do so that it tells its state, and what another one is told so that it has the same.

State comes as fields with a name each: `v:NAME` a variable, `f:NAME` and `F:NAME` a function and its attributes, and
named ones such as `aliases`; each holds text that the shell itself wrote to be read back.
"""

from __future__ import annotations

# The shell's own, or made up anew by each shell; RANDOM must not repeat itself in siblings.
_OWN_VARIABLES = (
    "BASH|BASHOPTS|BASHPID|BASH_ALIASES|BASH_ARGC|BASH_ARGV|BASH_ARGV0|BASH_CMDS|BASH_COMMAND|"
    "BASH_EXECUTION_STRING|BASH_LINENO|BASH_SOURCE|BASH_SUBSHELL|BASH_VERSINFO|BASH_VERSION|BASH_XTRACEFD|"
    "COMP_WORDBREAKS|DIRSTACK|EPOCHREALTIME|EPOCHSECONDS|EUID|FUNCNAME|GROUPS|HISTCMD|HOSTTYPE|LINENO|"
    "MACHTYPE|OSTYPE|PIPESTATUS|POSIXLY_CORRECT|PPID|RANDOM|SECONDS|SHELLOPTS|SRANDOM|UID|_|__status"
)
# What a fresh bash defines by itself.
_DEFAULT_VARIABLES = ["HOSTNAME", "IFS", "OLDPWD", "OPTERR", "OPTIND", "PATH", "PS4", "PWD", "SHELL", "SHLVL", "TERM"]
_PREFIXES = " ".join(f'"${{!{letter}@}}"' for letter in "_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")

# In POSIX mode special builtins come before functions, so these words mean what they say whatever the session defined.
# Both halves run in a copy of the shell, which may undefine what is in the way; only it and the session's own shell
# write to the descriptor. `if` keeps a `set -e` from ending the session.
BASH_LINE = (
    "if ( __skyenv_set=$SHELLOPTS __skyenv_shopt=$BASHOPTS; POSIXLY_CORRECT=y; \\. {dir}/save ) 2>/dev/null; "
    "then __status=0; else __status=1; fi; "
    "if ( POSIXLY_CORRECT=y; \\unset -f declare printf; \\printf 'f:builtin\\0' >&9; \\declare -f builtin >&9; "
    "\\printf '\\0' >&9 ) 2>/dev/null; then __status=0; else __status=1; fi; \\printf 'end\\0' >&9\n"
)
BASH_SAVE = f"""\\unset -f builtin
\\builtin printf 'traps\\0' >&9; \\builtin trap >&9; \\builtin printf '\\0' >&9
\\builtin trap - DEBUG ERR RETURN EXIT
\\set +euxvfC
\\exec >&9
\\builtin set +o posix
\\builtin printf 'disabled\\0'; \\builtin enable -n; \\builtin printf '\\0'
\\builtin enable alias declare export mapfile umask unalias
\\builtin printf 'aliases\\0'; \\builtin alias -p; \\builtin printf '\\0'
\\builtin unalias -a
\\builtin printf 'set\\0%s\\0shopt\\0%s\\0' "$__skyenv_set" "$__skyenv_shopt"
\\builtin printf 'umask\\0'; \\builtin umask; \\builtin printf '\\0'
\\builtin printf 'exports\\0'; \\builtin export -p; \\builtin printf '\\0'
\\builtin printf 'parameters\\0'; [[ $# = 0 ]] || \\builtin printf '%q ' "$@"; \\builtin printf '\\0'
\\builtin printf 'directories\\0'; [[ ${{#DIRSTACK[@]}} -le 1 ]] || \\builtin printf '%q ' "${{DIRSTACK[@]:1}}"
\\builtin printf '\\0'
for __skyenv_name in {_PREFIXES}; do
  case $__skyenv_name in {_OWN_VARIABLES}|__skyenv_*) ;; *)
    \\builtin printf 'v:%s\\0' "$__skyenv_name"; \\builtin declare -p -- "$__skyenv_name"; \\builtin printf '\\0';;
  esac
done
\\builtin declare -F >| {{dir}}/names
\\builtin mapfile -t __skyenv_names < {{dir}}/names
for __skyenv_name in "${{__skyenv_names[@]}}"; do
  \\builtin printf 'F:%s\\0%s\\0f:%s\\0' "${{__skyenv_name##* }}" "$__skyenv_name" "${{__skyenv_name##* }}"
  \\builtin declare -f -- "${{__skyenv_name##* }}"; \\builtin printf '\\0'
done
"""
# A subshell of a POSIX shell may have forgotten the traps, so the session's own shell lists those.
SH_LINE = (
    "\\printf 'traps\\0' >&9; \\trap >&9; \\printf '\\0' >&9; "
    "if ( \\. {dir}/save ) 2>/dev/null; then __status=0; else __status=1; fi; \\printf 'end\\0' >&9\n"
)
SH_SAVE = """\\unset -f printf umask alias
exec >&9
\\printf 'options\\0'; \\set +o; \\printf '\\0umask\\0'; \\umask; \\printf '\\0exports\\0'; \\export -p
\\printf '\\0readonly\\0'; \\readonly -p; \\printf '\\0aliases\\0'; \\alias; \\printf '\\0variables\\0'; \\set
\\printf '\\0'
"""
_USED_WORDS = frozenset(b"builtin declare printf unset export set shopt trap umask cd pushd alias enable : . [".split())
_ARRIVE = """if [[ $PWD -ef . ]]; then
  __skyenv_old=${OLDPWD-}; \\builtin cd -- "$PWD"; OLDPWD=$__skyenv_old; \\builtin unset __skyenv_old
fi
"""
# A session may have a function called cd.
SETTLE = (
    '__skyenv_old=${{OLDPWD-}}; \\{word} cd -- "$PWD" 2>/dev/null || \\{word} cd -- {folder} || __status=1; '
    "OLDPWD=$__skyenv_old; \\unset -v __skyenv_old; \\printf '\\0end\\0' >&9\n"
)
_SH_ARRIVE = (
    '__skyenv_old=${OLDPWD-}; case $PWD in /*) cd -- "$PWD" ;; esac; OLDPWD=$__skyenv_old; unset __skyenv_old\n'
)


def bash_takeover(parts: dict[bytes, bytes], *, traps: bool) -> tuple[bytes, bytes]:
    """What makes a fresh bash tell the same: up to its variables, and the rest.

    Words that a function of the session could stand for are used before any function exists.
    """
    variables = [value for key, value in parts.items() if key.startswith(b"v:")]
    absent = [name.encode() for name in _DEFAULT_VARIABLES if b"v:" + name.encode() not in parts]
    shadows: list[bytes] = []
    functions: list[bytes] = []
    for key, value in parts.items():
        kind, _colon, name = key.partition(b":")
        if kind in (b"f", b"F") and value and key != b"F:builtin":
            text = b"\\builtin " + value + b"\n" if kind == b"F" else value
            (shadows if name in _USED_WORDS else functions).append(text)
    parameters, directories = parts[b"parameters"].strip(), parts[b"directories"].split()
    head = [b"\\shopt -u ${BASHOPTS//:/ }\n\\shopt -s extglob\n", *variables]
    head += [b"\\unset -v %s\n" % name for name in absent]
    rest = [_ARRIVE.encode(), b"\\umask ", parts[b"umask"]]
    rest += [b"\\set -- ", parameters, b"\n"] if parameters else []
    rest += [b"\\builtin pushd -n -- %s\n" % folder for folder in reversed(directories)]
    rest += [*sorted(functions, key=_is_attribute), parts[b"aliases"], parts[b"traps"] if traps else b""]
    # One command, so that it is parsed before any option, alias or function of it has an effect.
    last = [_options(parts), parts[b"disabled"], *sorted(shadows, key=_is_attribute)]
    rest += [b"{\n", *sorted(last, key=_defines_builtin), b"}\n"]
    return b"".join(head), b"".join(rest)


def _is_attribute(text: bytes) -> bool:
    return text.startswith(b"\\builtin ")


def _defines_builtin(text: bytes) -> bool:
    return text.startswith(b"builtin ")


def _options(parts: dict[bytes, bytes]) -> bytes:
    """Turn every option on or off; those that change what the next lines do come last."""
    wanted, shopts = parts[b"set"].split(b":"), parts[b"shopt"].split(b":")
    late = [name for name in (b"allexport", b"nounset", b"xtrace", b"verbose", b"errexit", b"posix") if name in wanted]
    off = [name for name in (b"braceexpand", b"hashall", b"interactive-comments") if name not in wanted]
    lines = [] if b"extglob" in shopts else [b"\\builtin shopt -u extglob\n"]
    lines += [b"\\builtin shopt -s %s\n" % name for name in shopts if name]
    lines += [b"\\builtin set +o %s\n" % name for name in off]
    lines += [b"\\builtin set -o %s\n" % name for name in wanted if name and name not in late]
    lines += [b"\\builtin set -o %s\n" % name for name in late]
    return b"".join(lines)


def sh_takeover(parts: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    """The same for a POSIX shell."""
    rest = [_SH_ARRIVE.encode(), b"umask " + parts[b"umask"], parts[b"traps"], parts[b"readonly"], parts[b"options"]]
    return parts[b"variables"] + b"\n" + parts[b"exports"], b"\n".join(rest) + b"\n"
