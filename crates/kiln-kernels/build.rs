//! Writes the uniform `Info` of each shader as a Rust struct, so that a launch names its fields and a launch
//! with a wrong field does not compile.
#![allow(clippy::disallowed_methods, reason = "a build script")]

use std::{
    env,
    error::Error,
    fmt::{self, Write},
    fs,
    path::Path,
};

const SHADERS: &str = "../../shaders";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={SHADERS}");
    let mut paths: Vec<_> =
        fs::read_dir(SHADERS)?.map(|file| Ok(file?.path())).collect::<Result<_, Box<dyn Error>>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "wgsl"));
    paths.sort();
    let (mut modules, mut uniforms) = (String::new(), String::new());
    for path in paths {
        let shader = path.file_stem().and_then(|stem| stem.to_str()).ok_or("names are Unicode")?;
        if let Some(fields) = fields(&fs::read_to_string(&path)?).map_err(|e| format!("{shader}: {e}"))? {
            write_module(&mut modules, shader, &fields)?;
            let names = fields.iter().map(|field| (&field.name, 4 * field.first)).collect::<Vec<_>>();
            writeln!(uniforms, "    &{names:?},")?;
        }
    }
    let docs = "/// The fields of all uniforms, with the bytes before each.";
    writeln!(modules, "{docs}\npub static UNIFORMS: &[&[(&str, usize)]] = &[\n{uniforms}];")?;
    let out = env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?;
    Ok(fs::write(Path::new(&out).join("shaders.rs"), modules)?)
}

struct Field {
    name: String,
    /// The Rust type.
    ty: String,
    /// The method that returns the bits of a number.
    bits: &'static str,
    /// Index of the first word.
    first: usize,
    /// Number of words.
    len: usize,
}

/// Returns the fields of the uniform of a shader at their WGSL offsets, or `None` without a uniform.
fn fields(text: &str) -> Result<Option<Vec<Field>>, Box<dyn Error>> {
    let Some((_, info)) = text.split_once("struct Info {\n") else { return Ok(None) };
    let (info, _) = info.split_once("\n}").ok_or("Info does not end")?;
    let (mut fields, mut next) = (Vec::new(), 0_usize);
    for line in info.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
        let (name, ty) =
            line.strip_suffix(',').and_then(|line| line.split_once(": ")).ok_or(format!("`{line}`"))?;
        let vector = ty.strip_prefix("vec").and_then(|ty| ty.strip_suffix("<u32>"));
        let (ty, bits, len) = match (ty, vector) {
            ("u32", _) => ("u32".to_owned(), "", 1),
            ("i32", _) => ("i32".to_owned(), ".cast_unsigned()", 1),
            ("f32", _) => ("f32".to_owned(), ".to_bits()", 1),
            (_, Some(len)) => (format!("[u32; {len}]"), "", len.parse()?),
            _ => return Err(format!("`{ty}` is no type of a field").into()),
        };
        // A vector of three is aligned like a vector of four.
        let first = next.next_multiple_of(usize::next_power_of_two(len));
        next = first + len;
        fields.push(Field { name: name.to_owned(), ty, bits, first, len });
    }
    Ok(Some(fields))
}

fn write_module(modules: &mut String, shader: &str, fields: &[Field]) -> fmt::Result {
    writeln!(modules, "pub(crate) mod {shader} {{")?;
    writeln!(modules, "    /// The uniform of `{shader}.wgsl`.")?;
    writeln!(modules, "    #[derive(Debug)]\n    pub(crate) struct Info {{")?;
    for Field { name, ty, .. } in fields {
        writeln!(modules, "        pub(crate) {name}: {ty},")?;
    }
    writeln!(modules, "    }}\n\n    impl From<Info> for Vec<u32> {{")?;
    writeln!(modules, "        fn from(info: Info) -> Self {{")?;
    let len = fields.last().map_or(0, |field| field.first + field.len);
    writeln!(modules, "            let mut words = vec![0; {len}];")?;
    for Field { name, bits, first, len, .. } in fields {
        match len {
            1 => writeln!(modules, "            words[{first}] = info.{name}{bits};")?,
            _ => {
                let end = first + len;
                writeln!(modules, "            words[{first}..{end}].copy_from_slice(&info.{name});")?;
            }
        }
    }
    writeln!(modules, "            words\n        }}\n    }}\n}}\n")
}
