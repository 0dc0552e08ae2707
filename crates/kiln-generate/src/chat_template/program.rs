//! Compiling a template, and rewriting what it is compiled to.
//!
//! minijinja counts the steps of a program, but not what a step makes: forty of them can double a string to terabytes. So
//! whatever an instruction makes is handed to a function that counts it. Where an instruction means something else than in
//! Python, a function stands in its place.

use std::collections::BTreeMap;

use minijinja::{
    Error, Value,
    machinery::{CodeGenerator, Instruction, Instructions, parse},
    syntax::SyntaxConfig,
};

use super::{meter, operators::DICT_METHODS};

/// The functions that a program calls, under names that no template can spell.
pub(super) const METER: &str = "|made";
pub(super) const STORE: &str = "|store";
pub(super) const CONCAT: &str = "~";
pub(super) const SUM: &str = "+";
pub(super) const REMAINDER: &str = "%";
pub(super) const METHOD: &str = ".";
pub(super) const LOOP: &str = "|loop";
pub(super) const ITEM: &str = "[]";
pub(super) const SLICE: &str = "[:]";

/// A program and its blocks, by name.
pub(super) type Program<'s> = (Instructions<'s>, BTreeMap<&'s str, Instructions<'s>>);

pub(super) fn compiled(source: &str) -> Result<Program<'_>, Error> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    let tree = parse(source, "chat template", syntax)?;
    let mut generator = CodeGenerator::new("chat template", source);
    generator.compile_stmt(&tree);
    let (program, blocks) = generator.finish();
    let blocks = blocks.iter().map(|(name, block)| Ok((*name, metered(block)?)));
    Ok((metered(&program)?, blocks.collect::<Result<_, Error>>()?))
}

/// Rewrites a program so that whatever it makes is counted, and so that it has Python's meaning where minijinja has another.
///
/// # Errors
/// For a constant that the compiler made too large.
fn metered<'s>(program: &Instructions<'s>) -> Result<Instructions<'s>, Error> {
    use Instruction::{
        Add, ApplyFilter, BuildList, BuildMacro, BuildMap, BuildTuple, CallFunction, CallMethod, CallObject,
        Emit, EmitRaw, EndCapture, GetAttr, GetItem, Iterate, Jump, JumpIfFalse, JumpIfFalseOrPop,
        JumpIfTrueOrPop, LoadConst, Mul, PushLoop, Rem, SetAttr, Slice, StringConcat, Swap,
    };
    let mut rewritten: Vec<(Vec<Instruction<'s>>, Option<usize>)> = Vec::new();
    let mut starts = Vec::new();
    let mut start = 0;
    while let Some(instruction) = program.get(rewritten.len() as u32) {
        let instruction = instruction.clone();
        let line = program.get_line(rewritten.len() as u32);
        if let LoadConst(value) = &instruction {
            meter::check_parts(value)?;
        }
        let parts = match instruction {
            EmitRaw(text) => vec![LoadConst(Value::from(text)), Emit],
            StringConcat => vec![CallFunction(CONCAT, Some(2)), CallFunction(METER, Some(1))],
            Add => vec![CallFunction(SUM, Some(2)), CallFunction(METER, Some(1))],
            Rem => vec![CallFunction(REMAINDER, Some(2)), CallFunction(METER, Some(1))],
            GetAttr(name) if DICT_METHODS.contains(&name) => {
                vec![LoadConst(Value::from(name)), CallFunction(METHOD, Some(2))]
            }
            GetItem => vec![CallFunction(ITEM, Some(2))],
            PushLoop(_) => vec![CallFunction(LOOP, Some(1)), instruction],
            SetAttr(_) => vec![Swap, CallFunction(STORE, Some(1)), Swap, instruction],
            Slice => vec![CallFunction(SLICE, Some(4)), CallFunction(METER, Some(1))],
            Iterate(_) | Mul | EndCapture | ApplyFilter(..) | CallFunction(..) | CallMethod(..)
            | CallObject(_) | BuildList(_) | BuildTuple(_) | BuildMap(_) => {
                vec![instruction, CallFunction(METER, Some(1))]
            }
            other => vec![other],
        };
        starts.push(start);
        start += parts.len() as u32;
        rewritten.push((parts, line));
    }
    starts.push(start);
    let moved = |to: u32| starts.get(to as usize).copied().unwrap_or(start);
    let mut out = Instructions::new(program.name(), program.source());
    for (parts, line) in rewritten {
        for part in parts {
            let part = match part {
                Iterate(to) => Iterate(moved(to)),
                Jump(to) => Jump(moved(to)),
                JumpIfFalse(to) => JumpIfFalse(moved(to)),
                JumpIfFalseOrPop(to) => JumpIfFalseOrPop(moved(to)),
                JumpIfTrueOrPop(to) => JumpIfTrueOrPop(moved(to)),
                BuildMacro(name, at, flags) => BuildMacro(name, moved(at), flags),
                other => other,
            };
            match line.and_then(|line| u16::try_from(line).ok()) {
                Some(line) => out.add_with_line(part, line),
                None => out.add(part),
            };
        }
    }
    Ok(out)
}
