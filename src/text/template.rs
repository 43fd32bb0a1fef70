//! The checkpoint's chat template (`chat_template.jinja`).

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde_json::{Map, Value};

use super::prompt::{Marker, Prompt};
use super::python_json::to_python_json;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

/// Renders messages to the prompt that the model was trained on, as `transformers` does.
pub struct ChatTemplate {
    file_name: String,
    environment: Environment<'static>,
}

/// Instructions that one rendering may run: far more than a million-token chat needs, and a second
/// or two of a template that would never end.
const FUEL: u64 = 50_000_000;

/// What a prompt depends on besides messages and tools.
#[derive(Debug, Clone, PartialEq)]
pub struct TemplateOptions {
    /// Whether the model reasons before it answers.
    pub enable_thinking: bool,
    /// Further template variables, such as `reasoning_effort` or `clear_thinking`. They cannot
    /// replace the ones that talon sets itself.
    pub extra: Map<String, Value>,
}

impl Default for TemplateOptions {
    /// Thinking on, as in the template itself.
    fn default() -> Self {
        Self { enable_thinking: true, extra: Map::new() }
    }
}

impl ChatTemplate {
    /// Compiles a template; a syntax error is named with its line.
    pub fn new(file_name: &str, source: &str) -> Result<Self> {
        let faulty = |error: minijinja::Error| describe(file_name, &error);
        let mut environment = Environment::new();
        // These are the settings of transformers' chat templates.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(faulty)?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_fuel(Some(FUEL));
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_template_owned(file_name.to_owned(), source.to_owned()).map_err(faulty)?;
        Ok(Self { file_name: file_name.to_owned(), environment })
    }

    /// Renders `messages`, an array of objects with a `role`, up to where the model's turn begins.
    ///
    /// The content of every message but the assistant's comes from outside: in it, the literal of
    /// one of `tokenizer`'s added tokens stays ordinary text. A `content` of `null` is empty.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        options: &TemplateOptions,
        tokenizer: &Tokenizer,
    ) -> Result<Prompt> {
        let template = self.environment.get_template(&self.file_name);
        let template = template.map_err(|e| describe(&self.file_name, &e))?;
        let extra = Value::Object(options.extra.clone());
        let tools = tools.unwrap_or(&Value::Null);
        let everything = [messages, tools, &extra].map(Value::to_string);
        let [messages_json, tools_json, extra_json] = &everything;
        let mut marker = Marker::new(
            tokenizer.added_tokens(),
            &[messages_json, tools_json, extra_json, template.source()],
        )?;
        let mut variables = options.extra.clone();
        variables.insert("messages".into(), prepare(messages, &mut marker)?);
        variables.insert("tools".into(), tools.clone());
        variables.insert("add_generation_prompt".into(), true.into());
        variables.insert("enable_thinking".into(), options.enable_thinking.into());
        let marked = template
            .render(minijinja::value::Serde(&variables))
            .map_err(|e| describe(&self.file_name, &e))?;
        Ok(Prompt::new(marked, marker.mark()))
    }
}

/// Checks the messages, marks text from outside and empties `content: null`, which some templates
/// would print as "None".
fn prepare(messages: &Value, marker: &mut Marker<'_>) -> Result<Value> {
    let messages = messages.as_array().ok_or_else(|| {
        Error::input("messages: expected an array of objects with role and content")
    })?;
    let mut prepared = Vec::with_capacity(messages.len());
    for (place, message) in messages.iter().enumerate() {
        let role = message.get("role").and_then(Value::as_str).ok_or_else(|| {
            Error::input(format!(
                "messages[{place}]: expected an object with a string \"role\"; use \"system\", \
                 \"user\", \"assistant\" or \"tool\""
            ))
        })?;
        let from_outside = role != "assistant";
        let mut message = message.clone();
        if let Some(content) = message.get_mut("content") {
            if content.is_null() {
                *content = "".into();
            } else if from_outside {
                marker.break_literals(content);
            }
        }
        prepared.push(message);
    }
    Ok(Value::Array(prepared))
}

/// One line with the file and the line in it.
fn describe(file_name: &str, error: &minijinja::Error) -> Error {
    let line = error.line().map(|line| format!(" line {line}:")).unwrap_or_default();
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    Error::input(format!(
        "{file_name}:{line} {}{detail}; expected a Jinja chat template that accepts these \
         messages, correct the messages or take the template from the checkpoint again",
        error.kind()
    ))
}

/// Replaces minijinja's filter, which knows no `ensure_ascii` and writes other separators.
fn tojson(
    value: minijinja::Value,
    options: Kwargs,
) -> std::result::Result<String, minijinja::Error> {
    if options.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        let detail = "tojson with ensure_ascii=True is not supported";
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, detail));
    }
    options.assert_all_used()?;
    to_python_json(&value)
        .map_err(|e| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string()))
}

/// How a template refuses its messages.
fn raise_exception(message: String) -> std::result::Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tokenizer() -> Tokenizer {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/glm-demo/tokenizer.json");
        Tokenizer::from_bytes(path, &std::fs::read(path).unwrap()).unwrap()
    }

    fn render(source: &str, messages: Value) -> Result<String> {
        let options = TemplateOptions {
            enable_thinking: false,
            extra: json!({"effort": "High", "enable_thinking": 3}).as_object().unwrap().clone(),
        };
        let tools = json!([{"ü": 1.0, "a": [true, null]}]);
        let template = ChatTemplate::new("chat_template.jinja", source)?;
        let prompt = template.render(&messages, Some(&tools), &options, &tokenizer())?;
        Ok(prompt.text().into_owned())
    }

    fn refusal(source: &str, messages: Value) -> String {
        let error = render(source, messages).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        error.to_string()
    }

    #[test]
    fn settings_are_those_of_transformers() {
        let source =
            "{% if true %}\n  {% set x = ' A<b '.strip().split('<') %}\n{{ x[0] }}\n{% endif %}\n";
        assert_eq!(render(source, json!([])).unwrap(), "A\n");
        let loops = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}<\
                     {% endfor %}";
        assert_eq!(render(loops, json!([])).unwrap(), "0<1<");
    }

    #[test]
    fn variables_and_tojson() {
        let source = "{{ tools | tojson(ensure_ascii=False) }} {{ effort }} {{ enable_thinking }} \
                      {{ add_generation_prompt }} {{ documents is defined }}";
        let expected = r#"[{"ü": 1.0, "a": [true, null]}] High False True False"#;
        assert_eq!(render(source, json!([])).unwrap(), expected);
        assert!(refusal("\n{{ 1 | tojson(ensure_ascii=true) }}", json!([])).contains("line 2"));
        assert!(refusal("{{ 1 | tojson(depth=1) }}", json!([])).contains("'depth'"));
    }

    #[test]
    fn faults_name_file_and_line() {
        let syntax = refusal("a\n\n{% if %}", json!([]));
        assert!(syntax.starts_with("chat_template.jinja: line 3: syntax error"), "{syntax}");
        let raised = refusal("\n{{ raise_exception('no tools') }}", json!([]));
        let expected = "chat_template.jinja: line 2: invalid operation: no tools;";
        assert!(raised.starts_with(expected), "{raised}");
        let in_macro = "{% macro m(x) %}\n{{ x.items() }}{% endmacro %}\n\n{{ m('s') }}";
        let in_macro = refusal(in_macro, json!([]));
        assert!(in_macro.starts_with("chat_template.jinja: line 2: unknown method"), "{in_macro}");
    }

    #[test]
    fn endless_recursion_is_refused() {
        let source = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
        assert!(refusal(source, json!([])).contains("recursion limit"));
        assert!(refusal(&"(".repeat(9999).replacen('(', "{{ (", 1), json!([])).contains("line 1"));
    }

    #[test]
    fn null_content_is_empty() {
        let source = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
        let messages = json!([{"role": "assistant", "content": null}, {"role": "user"}]);
        assert_eq!(render(source, messages).unwrap(), "[][]");
    }

    #[test]
    fn malformed_messages_are_named() {
        assert!(refusal("", json!({})).starts_with("messages: expected an array"));
        let second = refusal("", json!([{"role": "user"}, {"role": 1}]));
        assert!(second.starts_with("messages[1]: expected an object"), "{second}");
        assert!(refusal("", json!(["hi"])).starts_with("messages[0]"));
    }
}
