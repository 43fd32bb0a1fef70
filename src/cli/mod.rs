//! The command line: one file per subcommand. Nothing else in talon prints.

mod argv;
mod bench;
mod doctor;
mod generate;
mod interrupt;
mod kernels;
mod model_options;
mod progress;
mod serve;
mod terminal;
mod verify;
mod version;

use std::process::ExitCode;

use argh::FromArgs;

use crate::error::{Error, Kind, one_line};

/// Run GLM-5 from NVFP4 weights: one file, nothing to install.
#[derive(FromArgs)]
#[argh(
    example = "Ask the model that is inside this binary:\n  {command_name} generate \"What is 17 + 25?\"",
    example = "Measure this box:\n  {command_name} bench",
    example = "Say why it is slow:\n  {command_name} doctor",
    example = "Serve it to OpenAI's clients, with a chat page:\n  {command_name} serve",
    example = "Audit a checkpoint before loading it:\n  {command_name} verify --model ./GLM-5.2-NVFP4 --tp 8",
    note = "Options may be written --name value or --name=value. -v (or RUST_LOG) logs more.",
    error_code(1, "failed while running"),
    error_code(2, "bad arguments or bad input (checkpoint, prompt file)"),
    error_code(3, "bench: speculation changed the text, which it must not"),
    error_code(4, "doctor: a check has failed"),
    error_code(130, "interrupted")
)]
struct Talon {
    #[argh(subcommand)]
    command: Command,
}

#[derive(FromArgs)]
#[argh(subcommand)]
enum Command {
    Bench(bench::BenchCommand),
    Doctor(doctor::DoctorCommand),
    Generate(generate::GenerateCommand),
    Kernels(kernels::KernelsCommand),
    Serve(serve::ServeCommand),
    Verify(verify::VerifyCommand),
    Version(version::VersionCommand),
}

/// Runs the command that `args` (without the program's name) ask for; the result is the exit code
/// of DESIGN §4.
pub fn run(args: Vec<String>) -> ExitCode {
    let normalised = argv::normalise(args);
    start_log(normalised.verbosity);
    let args: Vec<&str> = normalised.args.iter().map(String::as_str).collect();
    let talon = match Talon::from_args(&["talon"], &args) {
        Ok(talon) => talon,
        Err(exit) if exit.status.is_ok() => {
            return match terminal::print(&format!("{}\n", exit.output.trim_end())) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => report(&error),
            };
        }
        Err(exit) => return report(&Error::input(usage_error(&exit.output))),
    };
    // Before there is any thread: all of them must leave the signal to the one that waits for it.
    interrupt::install(matches!(talon.command, Command::Serve(_)));
    let done = match talon.command {
        Command::Bench(command) => return finish(command.run()),
        Command::Doctor(command) => return finish(command.run()),
        Command::Generate(command) => command.run(),
        Command::Kernels(command) => command.run(),
        Command::Serve(command) => command.run(),
        Command::Verify(command) => return finish(command.run()),
        Command::Version(command) => command.run(),
    };
    finish(done.map(|()| ExitCode::SUCCESS))
}

fn finish(done: Result<ExitCode, Error>) -> ExitCode {
    done.unwrap_or_else(|error| report(&error))
}

fn report(error: &Error) -> ExitCode {
    if error.kind() != Kind::BrokenPipe {
        terminal::print_stderr(&format!("talon: {error}\n"));
    }
    ExitCode::from(error.exit_code())
}

/// argh's message on bad usage, with the way out.
fn usage_error(output: &str) -> String {
    if let Some(text) = output.trim().strip_prefix("Unrecognized argument: ")
        && text.starts_with('-')
        && !text.starts_with("--")
    {
        return format!(
            "unrecognized argument {text}; a prompt that begins with - goes behind --: talon \
             generate -- \"{text}\""
        );
    }
    let listed = "talon --help and talon COMMAND --help list what there is";
    // argh names what Rust's own parsers of numbers say.
    if let Some(rest) = output.trim().strip_prefix("Error parsing option '")
        && let Some((option, rest)) = rest.split_once("' with value '")
        && let Some((value, reason)) = rest.rsplit_once("': ")
    {
        let expected = match reason {
            "invalid float literal" => "expected a number",
            "number too large to fit in target type" => "expected a smaller number",
            _ => "expected a whole number",
        };
        return format!("{option} {value}: {expected}; {listed}");
    }
    let first: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    format!("{}; {listed}", first.join(" ").trim_end_matches('.'))
}

/// Warnings by default, one line each without a time; `-v` and RUST_LOG show more.
fn start_log(verbosity: usize) {
    use std::io::Write;
    let level = match verbosity {
        0 => "warn",
        1 => "talon=info,warn",
        2 => "talon=debug,info",
        _ => "trace",
    };
    let environment = env_logger::Env::default().default_filter_or(level);
    env_logger::Builder::from_env(environment)
        .format(|out, record| {
            let level = record.level().as_str().to_lowercase();
            // Names from files may hold line breaks or codes that a terminal obeys.
            writeln!(out, "talon: {level}: {}", one_line(record.args().to_string()))
        })
        .init();
}
