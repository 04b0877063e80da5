//! Bytes as a source of choices.

/// The remaining bytes. After their end every byte is 0.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        head
    }

    fn number(&mut self, bytes: usize) -> u64 {
        let taken = self.bytes(bytes);
        taken
            .iter()
            .rev()
            .fold(0, |number, &byte| number << 8 | u64::from(byte))
    }

    pub(crate) fn u8(&mut self) -> u8 {
        self.number(1) as u8
    }

    pub(crate) fn u16(&mut self) -> u16 {
        self.number(2) as u16
    }

    pub(crate) fn u32(&mut self) -> u32 {
        self.number(4) as u32
    }

    pub(crate) fn u64(&mut self) -> u64 {
        self.number(8)
    }

    /// A number below `limit`, from up to 2 bytes.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        let raw = if limit <= 256 {
            usize::from(self.u8())
        } else {
            usize::from(self.u16())
        };
        raw % limit
    }

    /// A number that is often near a value that code compares with.
    pub(crate) fn edgy(&mut self) -> u64 {
        let shift = self.u8();
        let small = u64::from(self.u8());
        match shift % 5 {
            0 => small,
            1 => (1u64 << (shift % 64)).wrapping_add(small).wrapping_sub(128),
            2 => u64::MAX - small,
            3 => u64::from(self.u32()),
            _ => self.u64(),
        }
    }
}
