//! The build script of `weft-fi`, which has the exports (`provider/Cargo.toml`: `build =
//! "../build.rs"`). It is in this folder, beside `include/` with the header that it generates.
//!
//! - `weft.h` is generated from `provider/src/exports` into `OUT_DIR`. A test of `weft-fi` compares
//!   it with `include/weft.h`; `make header` updates that file.
//! - The library is linked so that it stays mapped after a `dlclose`: threads and thread-local data
//!   may outlive libfabric's clean-up.

use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");

    let manifest = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    let exports = manifest.join("src/exports");
    println!("cargo:rerun-if-changed={}", exports.display());
    println!(
        "cargo:rerun-if-changed={}",
        manifest.join("../build.rs").display()
    );

    let mut sources = Vec::new();
    for entry in std::fs::read_dir(&exports)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("mod.rs")
        {
            sources.push(path);
        }
    }
    sources.sort(); // the order of a directory is nobody's promise

    let out = Path::new(&std::env::var("OUT_DIR")?).join("weft.h");
    let mut text = Vec::new();
    header(&sources)?.write(&mut text);
    // C89 has no such comments
    let text = String::from_utf8(text)?;
    let text = text.replace("// extern \"C\"", "/* extern \"C\" */");
    let text = text.replace("// __cplusplus", "/* __cplusplus */");
    std::fs::write(out, text)?;
    Ok(())
}

fn header(sources: &[PathBuf]) -> Result<cbindgen::Bindings, cbindgen::Error> {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        header: Some(
            "/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */\n\
             /* What libweft-fi.so exports. Generated from provider/src/exports: `make header`. */"
                .to_owned(),
        ),
        include_guard: Some("WEFT_H".to_owned()),
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        // libfabric's header defines the calls of fi_mr(3) as static functions: the declarations
        // after it have no effect, and the symbols are for programs without that header.
        after_includes: Some(
            "\n#ifndef WEFT_STANDALONE\n\
             #include <rdma/fi_domain.h>\n\
             #include <rdma/providers/fi_prov.h>\n\
             #else\n\
             struct fi_provider;\n\
             struct fid;\n\
             struct fid_domain;\n\
             struct fid_mr;\n\
             struct fi_mr_attr;\n\
             struct iovec;\n\
             #endif\n\
             struct fid_mem_monitor; /* of rdma/fi_ext.h */\n\n\
             /* The name of struct weft_mr_ops for fi_open_ops(3). */\n\
             #define WEFT_MR_OPS \"weft_mr_ops\"\n\
             /* Whether a table from fi_open_ops has a member. */\n\
             #define WEFT_HAS_OP(ops, member) \\\n\
             \x20 ((ops)->size > offsetof(struct weft_mr_ops, member) && (ops)->member)"
                .to_owned(),
        ),
        cpp_compat: true,
        style: cbindgen::Style::Tag,
        documentation_style: cbindgen::DocumentationStyle::C,
        usize_is_size_t: true,
        ..cbindgen::Config::default()
    };
    // no exported function names it: it is behind a pointer
    config.export.include.push("weft_mr_ops".to_owned());
    // libfabric's structures come from its own headers, where they have no typedef.
    for name in [
        "fi_provider",
        "fid",
        "fid_domain",
        "fid_mem_monitor",
        "fid_mr",
        "fi_mr_attr",
        "iovec",
    ] {
        let spelled = format!("struct {name}");
        config.export.rename.insert(name.to_owned(), spelled);
    }
    let builder = sources.iter().fold(
        cbindgen::Builder::new().with_config(config),
        |builder, source| builder.with_src(source),
    );
    builder.generate()
}
