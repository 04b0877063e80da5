//! All symbols that the shared object exports. `include/weft.h` is generated from this module.

mod init;
mod mr;
pub mod mr_ops;

pub use init::{fi_prov_ini, weft_version};
pub use mr::{
    fi_mr_bind, fi_mr_desc, fi_mr_enable, fi_mr_key, fi_mr_map_raw, fi_mr_raw_attr, fi_mr_refresh,
    fi_mr_reg, fi_mr_regattr, fi_mr_regv, fi_mr_unmap_key,
};

#[cfg(test)]
mod tests {
    #[test]
    fn the_checked_in_header_is_the_one_that_the_build_makes() {
        let built = include_str!(concat!(env!("OUT_DIR"), "/weft.h"));
        let kept = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../include/weft.h"));
        assert!(
            built == kept,
            "include/weft.h is out of date: run `make header`"
        );
    }
}
