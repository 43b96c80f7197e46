//! GBNF: a text is accepted exactly if a simple matcher, which follows every derivation, accepts it.

use std::sync::Arc;

use penstock_guidance::{CompiledGrammar, GrammarSpec, GuidanceError};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::common::{Random, Tokens, bytes, compiler, tokens, words};

fn compile(tokens: &Tokens, source: &str) -> Result<Arc<CompiledGrammar>, GuidanceError> {
    compiler(tokens).compile(&GrammarSpec::Gbnf(source.to_owned()))
}

/// Whether the masks allow these tokens, and then the end.
fn accepts(tokens: &Tokens, grammar: &CompiledGrammar, ids: &[u32]) -> bool {
    let mut matcher = grammar.start().unwrap();
    ids.iter().chain([&tokens.end]).all(|&id| {
        tokens.mask(&mut matcher).is_ok_and(|allowed| allowed.contains(&id)) && matcher.accept(id).is_ok()
    })
}

/// Checks which tokens a grammar accepts.
fn check_ids(tokens: &Tokens, source: &str, accepted: &[Vec<u32>], rejected: &[Vec<u32>]) {
    let grammar = compile(tokens, source).unwrap_or_else(|error| panic!("{source}\n{error}"));
    for ids in accepted {
        assert!(accepts(tokens, &grammar, ids), "{ids:?} is rejected by\n{source}");
    }
    for ids in rejected {
        assert!(!accepts(tokens, &grammar, ids), "{ids:?} is accepted by\n{source}");
    }
}

/// Checks which texts a grammar accepts.
fn check(source: &str, accepted: &[&str], rejected: &[&str]) {
    let tokens = bytes();
    let spell = |texts: &[&str]| texts.iter().map(|text| tokens.spell(text)).collect::<Vec<_>>();
    let (accepted, rejected) = (spell(accepted), spell(rejected));
    check_ids(&tokens, source, &accepted, &rejected);
}

/// The error of a source.
fn error(source: &str) -> String {
    match compile(&words(1, 300), source) {
        Ok(_) => panic!("compiled:\n{source}"),
        Err(error) => error.to_string(),
    }
}

#[derive(Clone, Debug)]
enum Expression {
    Literal(String),
    /// Whether it is negated, and its characters.
    Class(bool, Vec<char>),
    Any,
    Rule(usize),
    Sequence(Vec<Expression>),
    Choice(Vec<Expression>),
    Repeat(Box<Expression>, u32, Option<u32>),
}

const LETTERS: [char; 3] = ['a', 'b', 'c'];
const MAX_LENGTH: usize = 5;

impl Expression {
    fn write(&self) -> String {
        let join = |parts: &[Self], separator: &str| {
            parts.iter().map(Self::write).collect::<Vec<_>>().join(separator)
        };
        match self {
            Self::Literal(text) => format!("\"{text}\""),
            Self::Class(negated, members) => {
                format!("[{}{}]", if *negated { "^" } else { "" }, members.iter().collect::<String>())
            }
            Self::Any => ".".into(),
            Self::Rule(0) => "root".into(),
            Self::Rule(index) => format!("rule-{index}"),
            Self::Sequence(parts) => format!("({})", join(parts, " ")),
            Self::Choice(parts) => format!("({})", join(parts, " | ")),
            Self::Repeat(part, min, max) => {
                let part = part.write();
                match (min, max) {
                    (0, None) => format!("({part})*"),
                    (1, None) => format!("({part})+"),
                    (0, Some(1)) => format!("({part})?"),
                    (min, None) => format!("({part}){{{min},}}"),
                    (min, Some(max)) if min == max => format!("({part}){{{min}}}"),
                    (min, Some(max)) => format!("({part}){{{min},{max}}}"),
                }
            }
        }
    }

    /// The ends of the texts that it matches from `start`, as bits. `rules` has those of the rules, by start.
    fn ends(&self, text: &[char], start: usize, rules: &[Vec<u32>]) -> u32 {
        let one = |matches: bool| if matches { 2 << start } else { 0 };
        match self {
            Self::Literal(literal) => {
                let literal: Vec<char> = literal.chars().collect();
                if text[start..].starts_with(&literal) { 1 << (start + literal.len()) } else { 0 }
            }
            Self::Class(negated, members) => {
                one(text.get(start).is_some_and(|character| members.contains(character) != *negated))
            }
            Self::Any => one(start < text.len()),
            Self::Rule(index) => rules[*index][start],
            Self::Sequence(parts) => parts.iter().fold(1 << start, |from, part| part.step(text, from, rules)),
            Self::Choice(parts) => parts.iter().fold(0, |all, part| all | part.ends(text, start, rules)),
            Self::Repeat(part, min, max) => {
                let mut from = (0..*min).fold(1 << start, |from, _| part.step(text, from, rules));
                // More repetitions than characters match nothing new.
                for _ in *min..max.unwrap_or(min + MAX_LENGTH as u32).max(*min) {
                    from |= part.step(text, from, rules);
                }
                from
            }
        }
    }

    fn step(&self, text: &[char], from: u32, rules: &[Vec<u32>]) -> u32 {
        let starts = (0..=text.len()).filter(|start| from >> start & 1 == 1);
        starts.fold(0, |all, start| all | self.ends(text, start, rules))
    }
}

/// Whether the first rule matches the text: the smallest table of ends that all rules agree with.
fn matches(rules: &[Expression], text: &[char]) -> bool {
    let mut ends = vec![vec![0; text.len() + 1]; rules.len()];
    loop {
        let next: Vec<Vec<u32>> = rules
            .iter()
            .map(|rule| (0..=text.len()).map(|start| rule.ends(text, start, &ends)).collect())
            .collect();
        if next == ends {
            return ends[0][0] >> text.len() & 1 == 1;
        }
        ends = next;
    }
}

fn expressions(num_rules: usize) -> impl Strategy<Value = Expression> {
    let members = proptest::sample::subsequence(LETTERS.to_vec(), 1..=2);
    let leaf = prop_oneof![
        3 => "[abc]{0,3}".prop_map(Expression::Literal),
        3 => (any::<bool>(), members).prop_map(|(negated, members)| Expression::Class(negated, members)),
        1 => Just(Expression::Any),
        3 => (0..num_rules).prop_map(Expression::Rule),
    ];
    leaf.prop_recursive(3, 10, 3, |inner| {
        let repetitions = prop_oneof![
            Just((0, None)),
            Just((1, None)),
            Just((0, Some(1))),
            (0..3_u32, 0..3_u32).prop_map(|(min, more)| (min, Some(min + more))),
            (0..3_u32).prop_map(|min| (min, None)),
        ];
        prop_oneof![
            3 => proptest::collection::vec(inner.clone(), 0..4).prop_map(Expression::Sequence),
            2 => proptest::collection::vec(inner.clone(), 1..4).prop_map(Expression::Choice),
            2 => (inner, repetitions)
                .prop_map(|(part, (min, max))| Expression::Repeat(Box::new(part), min, max)),
        ]
    })
}

/// Rules of which the first is recursive: a text without recursion is one terminal.
fn grammars() -> impl Strategy<Value = Vec<Expression>> {
    (1..4_usize).prop_flat_map(|count| {
        let [first, before, after] = [(); 3].map(|()| expressions(count));
        let others = proptest::collection::vec(expressions(count), count - 1);
        (first, before, after, others).prop_map(|(first, before, after, others)| {
            let recursion = Expression::Sequence(vec![before, Expression::Rule(0), after]);
            let root = Expression::Choice(vec![first, recursion]);
            [root].into_iter().chain(others).collect()
        })
    })
}

/// All texts of the letters up to the maximum length.
fn all_texts() -> Vec<Vec<char>> {
    let mut texts = vec![Vec::new()];
    let mut from = 0;
    for _ in 0..MAX_LENGTH {
        let to = texts.len();
        for index in from..to {
            for letter in LETTERS {
                let text = texts[index].iter().copied().chain([letter]).collect();
                texts.push(text);
            }
        }
        from = to;
    }
    texts
}

#[test]
fn random_grammars_accept_what_the_simple_matcher_accepts() {
    // Words of several characters go beyond the ends of terminals.
    let tokens = tokens(&[b"ab", b"ba", b"bc", b"caa", b"cb"]);
    let compiler = compiler(&tokens);
    let texts = all_texts();
    let config = Config { cases: 300, failure_persistence: None, max_shrink_iters: 100, ..Config::default() };
    let mut runner = TestRunner::new(config);
    let result = runner.run(&grammars(), |rules| {
        let names = rules.iter().enumerate();
        let source: Vec<String> = names
            .map(|(index, rule)| format!("{} ::= {}", Expression::Rule(index).write(), rule.write()))
            .collect();
        let source = source.join("\n");
        let grammar = match compiler.compile(&GrammarSpec::Gbnf(source.clone())) {
            Ok(grammar) => grammar,
            Err(GuidanceError::DeadEnd { .. }) => {
                prop_assert!(!texts.iter().any(|text| matches(&rules, text)), "{}", source);
                return Ok(());
            }
            Err(error) => return Err(TestCaseError::fail(format!("{error}\n{source}"))),
        };
        for text in &texts {
            let ids = tokens.spell(&text.iter().collect::<String>());
            let (accepted, expected) = (accepts(&tokens, &grammar, &ids), matches(&rules, text));
            prop_assert_eq!(accepted, expected, "{:?}\n{}", text, source);
        }
        Ok(())
    });
    result.unwrap();
}

const JSON: &str = r#"
root   ::= object   # the whole text
value  ::= object | list | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
)? "}" ws
list   ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1f\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn grammars_of_the_usual_kinds_accept_their_texts() {
    let arithmetic = "root ::= (expr \"=\" ws term \"\\n\")+\nexpr ::= term ([-+*/] ws term)*\n\
                      term ::= name | number | \"(\" ws expr \")\" ws\nname ::= [a-z] [a-z0-9]* ws\n\
                      number ::= [0-9]+ ws\nws ::= [ \\t\\n]*";
    let moves = "root ::= (\"1. \" move \" \" move \"\\n\"\n  ([1-9] [0-9]? \". \" move \" \" move \"\\n\")* )\n\
                 move ::= (pawn | piece | castle) [+#]?\npawn ::= ([a-h] \"x\")? [a-h] [1-8] (\"=\" [NBKQR])?\n\
                 piece ::= [NBKQR] [a-h]? [1-8]? \"x\"? [a-h] [1-8]\ncastle ::= \"O-O\" \"-O\"?";
    let program = "root ::= statement*\nstatement ::= type name ws \"=\" ws value \";\" | name ws \"=\" ws value \";\"\n\
                   type ::= \"int\" ws | \"float\" ws\nname ::= [a-zA-Z_] [a-zA-Z_0-9]*\n\
                   value ::= name | [0-9]+ | \"(\" value \")\"\nws ::= [ \\n]+";
    let bullets = "root ::= item+\n# Excludes all ends of lines\nitem ::= \"- \" [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ \"\\n\"";
    let words = "root ::= (word [ .,!?])+\nword ::= [ぁ-ゟァ-ヿ一-鿿]+ | [a-zA-Z']+";
    check(
        JSON,
        &["{}", r#"{"a": [1, -2.5e+3,"\u00e9é日"], "b": {"c": true }}"#],
        &["", "[]", r#"{"a": 01}"#, r#"{"a"}"#],
    );
    check(arithmetic, &["1=1\n", "(a1 + 2)*b = 3\n  \nx=y \n"], &["1=1", "1+=2\n", "(1=2\n"]);
    check(moves, &["1. e4 e5\n", "1. e4 Nf6\n12. exd5 O-O-O+\n"], &["1. e9 e5\n", "1. e4\n"]);
    check(program, &["", "int x = 1;intx = (y);", "interval = 5;"], &["int = ;", "x = (1;"]);
    check(bullets, &["- a\n", "- \u{84}é\n- b\n"], &["- \n", "- a\u{2028}\n", "- a"]);
    check(words, &["にほん 日本,It's ok."], &["日本", "1 "]);
}

#[test]
fn escapes_and_classes_match_their_characters() {
    check(r#"root ::= "\n\t\r\\\"\[\]\x41\u00e9\U0001F600""#, &["\n\t\r\\\"[]Aé😀"], &["", "\n"]);
    check(r"root ::= [\]\-\\^a-c]", &["]", "-", "\\", "^", "b"], &["d", ""]);
    check("root ::= [a-]", &["a", "-"], &["b"]);
    check(r"root ::= [^\n]", &["é", "\0", "😀"], &["\n", "ab"]);
    check("root ::= .", &["\n", "é", "😀"], &["", "ab"]);
    check("root ::= [\\ud7ff-\\ue000]", &["\u{d7ff}", "\u{e000}"], &["a"]);
    check("root ::= \"#\" # \"a\"\r\n  # another comment\r\n", &["#"], &["#a"]);
}

#[test]
fn rules_can_be_empty_recursive_and_continued_on_lines() {
    check("root ::= ", &[""], &["a"]);
    check("root ::= | \"a\" |\n \"b\"", &["", "a", "b"], &["ab"]);
    check("root ::=\n\"a\" (\n \"b\"\n |\n \"c\" ) \"d\"", &["abd", "acd"], &["ad"]);
    check("root ::= root \"+\" root | [0-9]", &["1", "1+2+3"], &["1+", ""]);
    check("root ::= \"a\" root \"b\" |", &["", "aabb"], &["aab"]);
    check("root ::= unused-rule{0}\nunused-rule ::= \"a\" unused-rule", &[""], &["a"]);
    check("root ::= endless | \"a\" | endless*\nendless ::= \"b\" endless", &["", "a"], &["b"]);
}

#[test]
fn tokens_of_several_characters_follow_the_grammar() {
    let tokens = words(11, 1_500);
    let grammar = compile(&tokens, JSON).unwrap();
    for seed in 0..20 {
        let text = tokens.generate(&mut grammar.start().unwrap(), &mut Random(seed), 40).unwrap();
        assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{text}");
    }
}

#[test]
fn references_match_tokens_by_name_and_id() {
    let tokens = bytes();
    let [call, end_call, think] = [1, 2, 4].map(|offset| tokens.end + offset);
    let [a, b] = [b'a', b'b'].map(u32::from);
    let check = |source: &str, accepted: &[Vec<u32>], rejected: &[Vec<u32>]| {
        check_ids(&tokens, source, accepted, rejected);
    };
    check(
        "root ::= <tool_call> [a-z]+ </tool_call>",
        &[vec![call, a, b, end_call]],
        &[vec![call, end_call], vec![a, end_call]],
    );
    check(&format!("root ::= <[{call}]> \"a\""), &[vec![call, a]], &[vec![a], vec![call]]);
    check(
        "root ::= !</think>* </think> \"b\"",
        &[vec![think, b], vec![a, call, b, think, b]],
        &[vec![a, b], vec![tokens.end, think, b]],
    );
    check(&format!("root ::= <[{a}]> \"b\"*"), &[vec![a], vec![a, b]], &[vec![b]]);
    check(
        &format!("root ::= \"b\" !<[{a}]> | </think>"),
        &[vec![b, b], vec![b, call], vec![think]],
        &[vec![b, a], vec![b]],
    );
}

#[test]
fn refused_grammars_are_named_by_line_and_rule() {
    let place = "line 2, rule \"item\": ";
    let cases = [
        ("\"a", "the string is not closed"),
        ("[a", "the character class is not closed"),
        ("[]", "a character class is empty"),
        (r"[^\x00-\U0010ffff]", "a character class matches no character"),
        ("[z-a]", "a range of characters ends before it begins"),
        (r#""\q""#, "unknown escape \\q"),
        (r#""\x4""#, "\\x needs 2 hexadecimal digits of a code point up to 10FFFF"),
        (r#""\U00110000""#, "\\U needs 8 hexadecimal digits of a code point up to 10FFFF"),
        (r#""\ud800""#, "\\ud800 is not a character"),
        ("(\"a\"", "\")\" is missing"),
        ("\"a\")", "unexpected ')'"),
        ("*", "there is nothing to repeat"),
        ("\"a\"{", "the number of repetitions is missing"),
        ("\"a\"{2", "\"}\" is missing"),
        ("\"a\"{2,1}", "the maximum number of repetitions is below the minimum"),
        ("\"a\"{1000001}", "the number of repetitions is 1000001; the limit is 1000000"),
        ("<|missing|>", "<|missing|> is not one token of the model"),
        ("<tool_call", "a token is written as <text> or <[id]>"),
        ("<[561]>", "the token id is 561; the limit is 560"),
        ("<|end|>", "<|end|> ends the output, so no rule can match it"),
        ("\"b\" | !<[97]>", "a reference to a token stands where text can stand, too"),
        ("[a-z]+ !<[97]>", "a reference to a token stands where text can stand, too"),
        (
            "!<[97]> | <[98]>",
            "a reference to a token stands where another reference to the same token can stand, too",
        ),
    ];
    for (body, reason) in cases {
        assert_eq!(
            error(&format!("root ::= item\nitem ::= {body}")),
            format!("GBNF grammar: {place}{reason}")
        );
    }
    assert!(error("item ::= \"a\"").contains("the rule \"root\" is not defined"));
    assert!(error("root ::= \"a\"\n  | missing").contains("line 2: the name of a rule is missing"));
    assert!(error("root ::= \"a\" |\n missing").contains("line 2: the rule \"missing\" is not defined"));
    assert!(
        error("root ::= \"a\"\nroot ::= \"b\"")
            .contains("line 2, rule \"root\": it is already defined in line 1")
    );
    assert!(
        error("root ::= \"a\" \"b\"\nitem")
            .contains("line 2, rule \"item\": \"::=\" is missing after the name")
    );
}
