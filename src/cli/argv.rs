//! What people type, in the form that argh reads: `-h`, `--version`, `--flag=value`, `-v`.

/// Arguments for argh, and how often `-v` was given.
#[derive(Debug, PartialEq, Eq)]
pub struct Normalised {
    /// Without `-v`; `--flag=value` in two.
    pub args: Vec<String>,
    /// Number of `-v`.
    pub verbosity: usize,
}

/// Options without a value. A `-` after any other option is that option's value (stdout); any other
/// `-` is the prompt (stdin), which argh takes only behind a `--`.
const SWITCHES: [&str; 10] = [
    "--check",
    "--comm",
    "--help",
    "--ignore-eos",
    "--ignore-index",
    "--no-think",
    "--raw",
    "--requalify",
    "--scales",
    "--sweep",
];

/// Rewrites `args` up to a `--`; what follows is text, whatever it looks like.
pub fn normalise(args: Vec<String>) -> Normalised {
    let mut normalised = Normalised { args: Vec::new(), verbosity: 0 };
    let mut stdin_prompt = false;
    let mut rest = args.into_iter();
    while let Some(arg) = rest.next() {
        if takes_value(normalised.args.last()) {
            normalised.args.push(arg);
            continue;
        }
        match arg.as_str() {
            "--" => {
                normalised.args.push(arg);
                normalised.args.extend(rest.by_ref());
            }
            "-" => stdin_prompt = true,
            "-h" => normalised.args.push("--help".into()),
            "--version" | "-V" if normalised.args.is_empty() => {
                normalised.args.push("version".into());
            }
            "--verbose" => normalised.verbosity += 1,
            short if is_verbose(short) => normalised.verbosity += short.len() - 1,
            _ => match split_value(&arg) {
                Some((flag, value)) => {
                    normalised.args.push(flag.to_owned());
                    normalised.args.push(value.to_owned());
                }
                None => normalised.args.push(arg),
            },
        }
    }
    if stdin_prompt {
        normalised.args.extend(["--".to_owned(), "-".to_owned()]);
    }
    normalised
}

/// Whether the argument after `arg` is its value.
fn takes_value(arg: Option<&String>) -> bool {
    let is_option = |arg: &String| arg.starts_with("--") && arg.len() > 2;
    arg.is_some_and(|arg| is_option(arg) && !SWITCHES.contains(&arg.as_str()))
}

/// `-v`, `-vv`, …
fn is_verbose(arg: &str) -> bool {
    arg.strip_prefix('-').is_some_and(|v| !v.is_empty() && v.chars().all(|c| c == 'v'))
}

/// `--flag=value`, where the flag is a name: a prompt may hold an `=`.
fn split_value(arg: &str) -> Option<(&str, &str)> {
    let (flag, value) = arg.split_once('=')?;
    let name = flag.strip_prefix("--")?;
    let is_name = name.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !name.is_empty();
    is_name.then_some((flag, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &str) -> Normalised {
        normalise(words.split(' ').map(str::to_owned).collect())
    }

    #[test]
    fn usual_spellings_become_arghs() {
        assert_eq!(args("bench -h").args, ["bench", "--help"]);
        assert_eq!(args("--version").args, ["version"]);
        assert_eq!(args("verify --tp=8 --json=-").args, ["verify", "--tp", "8", "--json", "-"]);
        assert_eq!(args("kernels --check --rows=4").args, ["kernels", "--check", "--rows", "4"]);
        let verbose = args("-vv bench -v --verbose");
        assert_eq!((verbose.args, verbose.verbosity), (vec!["bench".to_owned()], 4));
    }

    #[test]
    fn text_is_left_alone() {
        assert_eq!(args("generate x=1 --X=2").args, ["generate", "x=1", "--X=2"]);
        assert_eq!(args("generate -- -v --a=b -h").args, ["generate", "--", "-v", "--a=b", "-h"]);
    }

    #[test]
    fn a_dash_is_stdout_for_an_option_and_stdin_for_a_prompt() {
        assert_eq!(args("generate - --raw").args, ["generate", "--raw", "--", "-"]);
        assert_eq!(args("generate --raw -").args, ["generate", "--raw", "--", "-"]);
        assert_eq!(args("bench --json -").args, ["bench", "--json", "-"]);
    }

    #[test]
    fn an_options_value_is_left_alone() {
        let text = "generate --stop -v --system --a=b x";
        assert_eq!(args(text).args, text.split(' ').collect::<Vec<&str>>());
    }
}
