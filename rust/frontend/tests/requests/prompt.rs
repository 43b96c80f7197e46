//! The prompt side: tokenisation, bad words, grammars, errors.

use penstock_engine::{Port, StartError};
use penstock_frontend::Error;
use penstock_frontend::params::{ResponseFormat, ResponseKind, SamplingParams};
use penstock_frontend::prompt::{Mode, Prompt};
use penstock_types::Json;

use crate::support::{END, Setup, VOCABULARY_SIZE, bytes, saying};

fn params() -> SamplingParams {
    SamplingParams { max_tokens: Some(1), ..SamplingParams::default() }
}

/// The error of a request for a text.
fn error(setup: &Setup, prompt: &str, params: &SamplingParams, mode: Mode) -> Error {
    match setup.start(prompt, params, mode, &Port::with_condvar()) {
        Ok(_) => panic!("the request started"),
        Err(error) => error,
    }
}

fn json_object() -> SamplingParams {
    let format = ResponseFormat { kind: ResponseKind::JsonObject, json: Json(String::new()) };
    SamplingParams { response_format: Some(format), ..params() }
}

#[test]
fn text_and_token_ids_give_the_same_prompt() {
    let setup = saying([]);
    let prepare = |prompt| setup.frontend.prepare(&params(), prompt, Mode::Completion, &mut || true).unwrap();
    let port = Port::with_condvar();
    for prompt in [Prompt::Text("né".to_owned()), Prompt::Tokens(bytes("né"))] {
        let state = prepare(prompt).start(Vec::new(), &setup.frontend, &port).unwrap();
        crate::support::wait(&state, penstock_frontend::output::Milestone::End, &port);
        assert_eq!(&*state.result().unwrap().prompt_token_ids, bytes("né"));
    }
}

#[test]
fn special_tokens_in_the_text_of_a_chat_are_kept() {
    let setup = saying([]);
    assert_eq!(setup.run("a<|end|>", &params(), Mode::Chat).prompt_token_ids[1], END);
}

#[test]
fn a_prompt_has_at_least_one_token_and_leaves_room_for_another() {
    let setup = saying([]);
    assert!(matches!(error(&setup, "", &params(), Mode::Completion), Error::Start(StartError::Invalid(_))));
    let long = "x".repeat(256);
    assert!(matches!(
        error(&setup, &long, &params(), Mode::Completion),
        Error::Start(StartError::Invalid(_))
    ));
    assert_eq!(setup.run(&long, &params(), Mode::Scoring).prompt_token_ids.len(), 256);
    assert_eq!(setup.frontend.max_prompt_tokens(Mode::Completion), 255);
    assert_eq!(setup.frontend.max_prompt_tokens(Mode::Scoring), 256);
}

#[test]
fn prompt_of_more_than_two_lengths_is_not_counted() {
    let setup = saying([]);
    let counted = error(&setup, &"x".repeat(512), &params(), Mode::Completion).to_string();
    assert_eq!(
        counted,
        "prompt of 512 tokens exceeds the limit of 255 (max_model_len 256 less one token of output)"
    );
    for (mode, limit) in [(Mode::Completion, 255), (Mode::Scoring, 256)] {
        let uncounted = error(&setup, &"x".repeat(513), &params(), mode);
        let expected =
            format!("prompt of more than 512 tokens exceeds the limit of {limit} (max_model_len 256)");
        assert!(matches!(uncounted, Error::TooManyTokens { .. }));
        assert_eq!(uncounted.to_string(), expected);
    }
}

#[test]
fn bad_words_are_tokenised_at_the_start_and_after_a_space() {
    let setup = saying([]);
    let words = ["no", " no", "on"].map(str::to_owned).to_vec();
    setup.generate(&SamplingParams { bad_words: words, ..params() });
    let requests = setup.requests.lock().unwrap();
    assert_eq!(requests[0].sampling.bad_token_sequences, ["no", " no", "on", " on"].map(bytes));
}

#[test]
fn bad_words_are_limited_in_their_tokens() {
    let setup = saying([]);
    let words = |num_words: usize| (0..num_words).map(|index| format!("{index:08}")).collect();
    let params = |num_words| SamplingParams { bad_words: words(num_words), ..params() };
    setup.generate(&params(60)); // 60 * (8 + 9) ids
    match error(&setup, "a", &params(61), Mode::Completion) {
        Error::Field(error) => {
            assert_eq!((error.field, error.limit.as_str()), ("bad_words", "at most 1024 tokens in all"));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_response_format_becomes_the_grammar_of_the_request() {
    let setup = saying(bytes("{}"));
    setup.generate(&json_object());
    setup.generate(&params());
    let requests = setup.requests.lock().unwrap();
    assert_eq!([requests[0].grammar.is_some(), requests[1].grammar.is_some()], [true, false]);
}

#[test]
fn a_grammar_allows_stop_tokens_only_where_the_text_may_end() {
    let setup = saying(bytes("{}"));
    let stops = SamplingParams { stop_token_ids: vec![257], ..json_object() };
    setup.generate(&stops);
    let grammar = setup.requests.lock().unwrap()[0].grammar.clone().unwrap();
    let mut state = grammar.start().unwrap();
    let mut allowed = |tokens: &[u32]| {
        tokens.iter().for_each(|token| state.accept(*token).unwrap());
        let mut mask = vec![0_u32; VOCABULARY_SIZE.div_ceil(32)];
        state.mask(&mut mask).unwrap();
        [u32::from(b'{'), u32::from(b'}'), END, 257].map(|id| mask[id as usize / 32] & (1 << (id % 32)) != 0)
    };
    assert_eq!(allowed(&[]), [true, false, false, false]);
    assert_eq!(allowed(&bytes("{")), [false, true, false, false]);
    assert_eq!(allowed(&bytes("}"))[2..], [true, true]);
}

#[test]
fn an_invalid_grammar_is_an_error_of_its_field() {
    let setup = saying([]);
    let params = SamplingParams { regex: Some("(".to_owned()), ..params() };
    match error(&setup, "a", &params, Mode::Completion) {
        Error::Field(error) => {
            assert_eq!(error.field, "regex");
            assert!(error.limit.starts_with("a grammar for this model's vocabulary ("), "{error}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_compilation_that_is_no_longer_wanted_ends_with_an_error() {
    let setup = saying([]);
    // Nothing is wanted any more when the compiler looks for the first time, unless it is done by then.
    let prompt = Prompt::Text("a".to_owned());
    let params = SamplingParams { regex: Some("(a|b){1,9000}c".to_owned()), ..params() };
    if let Err(error) = setup.frontend.prepare(&params, prompt, Mode::Completion, &mut || false) {
        assert!(matches!(error, Error::Field(_)), "{error}");
    }
}

#[test]
fn a_stopped_engine_starts_and_compiles_nothing() {
    let setup = saying([]);
    setup.frontend.grammars.close();
    setup.frontend.engine.shutdown();
    for params in [params(), json_object()] {
        let error = error(&setup, "a", &params, Mode::Completion);
        assert!(matches!(error, Error::Start(StartError::Stopped(_))), "{error}");
    }
}

#[test]
fn check_mode_refuses_parameters_of_generate_and_of_chats() {
    let function = penstock_frontend::params::Function {
        name: "f".to_owned(),
        parameters: "{}".to_owned(),
        ignores_unsupported: false,
    };
    let tools = penstock_frontend::params::Tools { functions: vec![function], json: Json("[]".to_owned()) };
    let with_tools = SamplingParams { tools: Some(tools), ..params() };
    let field = |params: &SamplingParams, mode| params.check_mode(mode).err().map(|error| error.field);
    assert_eq!(field(&SamplingParams { num_beams: 2, ..params() }, Mode::Completion), Some("num_beams"));
    assert_eq!(field(&SamplingParams { best_of: Some(1), ..params() }, Mode::Chat), Some("best_of"));
    assert_eq!(field(&with_tools, Mode::Completion), Some("tools"));
    assert_eq!(field(&with_tools, Mode::Chat), None);
    assert_eq!(field(&params(), Mode::Scoring), None);
}
