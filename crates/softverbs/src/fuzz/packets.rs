//! Messages of the connection manager.

/// What decodes is what encodes to the same bytes; nothing else decodes.
///
/// # Panics
/// Where that is not so.
pub fn cm_message(data: &[u8]) {
    crate::cm::check_packet(data);
    // Most inputs fail at the first bytes: once more with a header that is right, and a length that
    // some kind has.
    let Some((&kind, body)) = data.split_first() else {
        return;
    };
    let mut packet = b"SVCM\x01\x00".to_vec();
    packet.extend([kind % 6, 0, 0, 0, 0, 0]);
    packet.extend(body);
    crate::cm::check_packet(&packet);
    for len in [12, 12 + 152, 12 + 231, 12 + 136] {
        packet.resize(len, 0);
        crate::cm::check_packet(&packet);
    }
}
